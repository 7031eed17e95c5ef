"""Low-rank adapters: their files, the layers that they change, and slots in which several serve."""
