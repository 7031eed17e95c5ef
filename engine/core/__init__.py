"""The engine loop on its one thread: plan, build the batch, run, commit, publish."""
