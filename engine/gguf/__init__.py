"""Checkpoints in llama.cpp's GGUF format, converted to model folders that mlx-lm reads."""

from .convert import model_folder

__all__ = ["model_folder"]
