from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class State:
    """A run's model (Qwen3 or Hybrid) and optimizers."""

    model: Any
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    tokens: int = 0

    def save(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        content = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "config": self.model.config.as_dict(),
            "step": self.step,
            "tokens": self.tokens,
        }
        torch.save(content, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        content = torch.load(path, weights_only=True)
        self.model.load_state_dict(content["model"])
        for optimizer, saved in zip(self.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens = content["step"], content["tokens"]
