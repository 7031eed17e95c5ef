"""Replay of request traces against the block manager, without a model."""
