"""Replaying traces of real traffic against the block manager, without a model."""
