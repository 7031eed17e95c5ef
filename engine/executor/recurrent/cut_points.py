"""Interception of mlx-lm's recurrence functions.

Most operations of a recurrent layer work row by row. Only its short convolutions and its recurrence
combine rows of a sequence. Their calls are the layer's cut points.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from ..overrides import model_modules


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A callable (rows, .., state) -> (y, new state).

    ``axis`` is the axis of the tokens: 1 for [B, S, ..], 2 for [B, H, S, D].
    """

    state: str
    position: int
    axis: int = 1


FUNCTIONS = {
    "gated_delta_update": CutPoint("state", 7),
    "ssm_update": CutPoint("state", 7),
    "recurrent_gla": CutPoint("h", 5, axis=2),
}
"""Functions that are cut points, by name."""

METHODS = {("rwkv7", "_wkv7"): CutPoint("state", 6)}
"""Methods that are cut points, by model file and name."""

CHILDREN = {
    ("recurrent_gemma", "Conv1d"): CutPoint("cache", 1),
    ("recurrent_gemma", "RGLRU"): CutPoint("cache", 1),
}
"""Submodules that are cut points, by model file and type."""

WHOLE = {("longcat_flash_ngram", "NgramEmbedding")}
"""Whole layers that are cut points, by model file and type."""

SCAN = CutPoint("state", 6)

_DEFINING = ("mlx_lm.models.gated_delta", "mlx_lm.models.ssm")


class Catcher(Protocol):
    def catch(
        self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


_catcher: ContextVar[Catcher | None] = ContextVar("octavo_catcher", default=None)


@contextmanager
def catching(catcher: Catcher) -> Iterator[None]:
    token = _catcher.set(catcher)
    try:
        yield
    finally:
        _catcher.reset(token)


def install_cut_points() -> None:
    for module in model_modules():
        for name in FUNCTIONS if module.__name__ not in _DEFINING else ():
            plain = vars(module).get(name)
            if callable(plain) and not hasattr(plain, "plain_of_mlx_lm"):
                setattr(module, name, _asking(name, plain))


def _asking(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        catcher = _catcher.get()
        return plain(*args, **kwargs) if catcher is None else catcher.catch(name, plain, args, kwargs)

    call.plain_of_mlx_lm = plain  # type: ignore[attr-defined]
    return call
