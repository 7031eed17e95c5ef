"""Quality loss of quantized pages, measured on a short text at load."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from ...api.config import AUTO, CHOSEN_FROM, EngineConfig
from ...api.errors import InvalidConfig
from ...api.outputs import TokenLogprob
from ..base import ModelRunner

log = logging.getLogger(__name__)

MAX_LOSS = 0.01  # nats per token; "auto" rejects page formats above this loss
WARN_LOSS = 0.05  # nats per token; a larger loss is logged as a warning
MAX_TEXT = 257  # positions
MIN_TOKENS = 16  # in shorter texts the loss is not measured

Scores = Sequence[TokenLogprob]
ScoreText = Callable[[ModelRunner, EngineConfig], Scores]
"""Function that scores a text with a configuration."""


def choose_format(config: EngineConfig, score: Callable[[EngineConfig], Scores]) -> EngineConfig:
    base = score(config.with_format("bf16"))
    if len(base) < MIN_TOKENS:
        return config.with_format("bf16") if config.kv_format == AUTO else config
    if config.kv_format != AUTO:
        loss = divergence(base, score(config))
        if not loss <= WARN_LOSS:
            log.warning(
                "%s: kv_format %s raises the perplexity of a short text by %.0f %%, probably because some "
                "channels of K are far larger than others; use kv_format auto or bf16",
                config.model, config.page_formats, 100 * math.expm1(min(loss, 2.0)),
            )  # fmt: skip
        return config
    losses = []
    for name in CHOSEN_FROM:
        try:
            loss = divergence(base, score(config.with_format(name)))
        except InvalidConfig as error:
            log.info("%s: kv_format %s cannot be chosen: %s", config.model, name, error)
            continue
        losses.append(f"{name} {100 * loss:.2g} %")
        if loss <= MAX_LOSS:
            break
    else:
        name = "bf16"
    log.info("%s: kv_format auto chose %s; losses on a short text: %s", config.model, name, ", ".join(losses))
    return config.with_format(name)


def divergence(base: Scores, other: Scores) -> float:
    if len(other) != len(base):
        return math.inf
    total = 0.0
    for mine, theirs in zip(base, other, strict=True):
        known = dict(theirs.top)
        pairs = [(math.exp(p), math.exp(known[token])) for token, p in mine.top if token in known]
        rest = [max(1 - sum(side), 1e-9) for side in zip(*pairs, strict=True)] if pairs else [1.0, 1e-9]
        total += sum(p * math.log(p / q) for p, q in [*pairs, (rest[0], rest[1])] if p > 0 and q > 0)
    return total / max(len(base), 1)
