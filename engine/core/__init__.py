"""The engine loop: plan, build batch, run, commit, publish."""
