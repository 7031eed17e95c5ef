"""Changes of modules, classes and objects of MLX and mlx-lm."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

_ORIGINALS = "_octavo_originals"

Call = Callable[..., Any]
Change = tuple[Any, str, Callable[[Any], Any]]
"""Owner and name of an attribute, and a function from the original to its replacement."""


def override(
    module: str, name: str, make: Callable[[Callable[..., mx.array]], Callable[..., mx.array]]
) -> None:
    """Replace a function, or a ``Class.method``, of a module by ``make(original)``."""
    found: Any = sys.modules.get(module)
    if found is None or name in (originals := found.__dict__.setdefault(_ORIGINALS, {})):
        return
    *owners, attribute = name.split(".")
    owner = functools.reduce(getattr, owners, found)
    original = originals[name] = getattr(owner, attribute)
    setattr(owner, attribute, functools.wraps(original)(make(original)))


def original(module: str, name: str) -> Callable[..., mx.array]:
    found: Any = sys.modules[module]
    function: Callable[..., mx.array] | None = found.__dict__.get(_ORIGINALS, {}).get(name)
    return functools.reduce(getattr, name.split("."), found) if function is None else function


def model_modules() -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("mlx_lm.models.")]


def rebind(name: str, original: Any, replacement: Any, *others: ModuleType) -> None:
    """Replace a function in all modules of mlx-lm's models, and in ``others``, that bind it."""
    for module in (*model_modules(), *others):
        if getattr(module, name, None) is original:
            setattr(module, name, replacement)


@contextmanager
def replaced(*changes: Change) -> Iterator[None]:
    """Replace attributes while the block runs."""
    originals = [getattr(owner, name) for owner, name, _ in changes]
    try:
        for (owner, name, make), original in zip(changes, originals, strict=True):
            setattr(owner, name, make(original))
        yield
    finally:
        for (owner, name, _), original in zip(changes, originals, strict=True):
            setattr(owner, name, original)


def override_call(module: Module, call: Call, **methods: Call) -> None:
    """Give a module a class of its own, with these methods."""
    plain = type(module)
    names = {"__call__": call, "__module__": plain.__module__, **methods}
    object.__setattr__(module, "__class__", type(plain.__name__, (plain,), names))


def restore_call(module: Module) -> None:
    object.__setattr__(module, "__class__", type(module).__bases__[0])


@contextmanager
def overridden(modules: Iterable[Module], call: Call, **methods: Call) -> Iterator[None]:
    different = list({id(module): module for module in modules}.values())
    for module in different:
        override_call(module, call, **methods)
    try:
        yield
    finally:
        for module in different:
            restore_call(module)


@functools.cache
def _subclass(kind: Any, make: Any) -> type:
    return type(kind.__name__, (kind,), make(kind))


def adapt_module(module: Any, make: Callable[[Any], dict[str, Any]], **values: object) -> None:
    """Give a module attributes, and the methods that ``make`` returns for its class."""
    for name, value in values.items():
        object.__setattr__(module, name, value)
    kind: Any = type(module)
    module.__class__ = _subclass(kind, make)
