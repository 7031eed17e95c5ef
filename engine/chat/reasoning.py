from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..api.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Reasoning:
    start: str
    end: str
    header: str = ""
    direct: str = ""
    is_harmony: bool = False

    def is_open(self, prompt_tail: str) -> bool:
        """Return whether a prompt with this end is inside the reasoning."""
        return prompt_tail.rstrip().endswith((self.start, self.start + self.header))

    def is_closed(self, prompt_tail: str) -> bool:
        """Return whether a prompt with this end has finished the reasoning."""
        return prompt_tail.rstrip().endswith(self.end)


_THINK = Reasoning("<think>", "</think>")
_PAIRS: Mapping[str, Reasoning] = {
    "qwen3": _THINK,
    "mistral": Reasoning("[THINK]", "[/THINK]"),
    "gemma4": Reasoning("<|channel>", "<channel|>", "thought\n"),
    "harmony": Reasoning(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        direct="<|channel|>final<|message|>",
        is_harmony=True,
    ),
    "longcat": Reasoning("<longcat_think>", "</longcat_think>"),
    "think_tokens": Reasoning("<|think:start|>", "<|think:end|>"),
    "kimi_k3": Reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "seed_oss": Reasoning("<seed:think>", "</seed:think>"),
}
_THINK_NAMES = (
    "deepseek_r1", "deepseek_v3", "deepseek_v31", "qwen3_thinking", "qwen35", "glm45", "glm47", "kimi",
    "kimi_k2", "minimax", "minimax_m2", "nemotron", "nano_v3", "step3", "smollm3", "granite", "ernie45",
    "think",
)  # fmt: skip
_NAMES: Mapping[str, Reasoning] = {
    **_PAIRS, **dict.fromkeys(_THINK_NAMES, _THINK),
    "gpt_oss": _PAIRS["harmony"], "magistral": _PAIRS["mistral"],
}  # fmt: skip

REASONING_PARSERS: tuple[str, ...] = tuple(sorted(_NAMES))


def reasoning_named(name: str) -> Reasoning | None:
    """Return the marks of the named parser; None for "none". Raises InvalidConfig for an unknown name."""
    if name in ("none", "off"):
        return None
    if name not in _NAMES:
        raise InvalidConfig(
            f"reasoning_parser must be one of auto, none, {', '.join(REASONING_PARSERS)}, got {name!r}; "
            "auto detects it from the chat template"
        )
    return _NAMES[name]


def reasoning_of(template: str, vocab: Mapping[str, int]) -> Reasoning | None:
    """Detect the reasoning marks from the chat template and the vocabulary; None if there are none."""
    for reasoning in _PAIRS.values():
        marks = (reasoning.start,) if reasoning.direct else (reasoning.start, reasoning.end)
        if all(mark in template for mark in marks) or all(mark in vocab for mark in marks):
            return reasoning
    end = template.rpartition("add_generation_prompt")[2]
    return next((reasoning for reasoning in _PAIRS.values() if reasoning.start in end), None)
