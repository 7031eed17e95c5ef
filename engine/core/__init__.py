"""The engine loop on its thread: plan, build the batch, run, commit, publish."""
