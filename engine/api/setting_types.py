"""Conversion of settings to their Python types.

A size may be text ("2GiB"), a path may be text, and a tuple may be a list. NumPy numbers are accepted.
Numbers in text ("32") and booleans are not accepted as numbers.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from .errors import InvalidRequest
from .size import parse_size
from .structured_output import StructuredOutput

Kind = Literal[
    "text", "int", "float", "size", "path", "names", "switch", "formats", "milliseconds",
    "texts", "pairs", "ints", "biases", "structured",
]  # fmt: skip


def _one_of(*types: type) -> Callable[[Any], Any]:
    def taken(value: Any) -> Any:
        if not isinstance(value, types):
            raise TypeError
        return value

    return taken


_text = _one_of(str)


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _float(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, bool | str | bytes):
        raise TypeError
    return float(value)


def _size(value: Any) -> int:
    return parse_size(value, least=0) if isinstance(value, str) else _int(value)


def _milliseconds(value: Any) -> float | str:
    return value if isinstance(value, str) else _float(value)


def _path(value: Any) -> Path:
    if value == "":
        raise ValueError
    return Path(os.fsdecode(value))


def _tuple_of(each: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def taken(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise TypeError
        return tuple(map(each, value))

    return taken


def split_pair(text: str) -> tuple[str, str]:
    """Split NAME=VALUE at the first ``=``. Raises ValueError if either part is missing."""
    name, _, value = text.partition("=")
    if not name.strip() or not name.isprintable() or not value:
        raise ValueError(f"must be NAME=VALUE with a name that can be printed, got {text!r:.100}")
    return name, value


def _pair(value: Any) -> str:
    split_pair(_text(value))
    return str(value)


def _biases(value: Any) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {_int(token): _float(bias) for token, bias in value.items()}


_TYPES: Mapping[Kind, tuple[str, Callable[[Any], Any]]] = {
    "text": ("text", _text),
    "formats": ("text", _text),
    "int": ("a whole number", _int),
    "float": ("a number", _float),
    "size": ("bytes as a whole number, or a size such as '2GiB'", _size),
    "milliseconds": ("a number of milliseconds, 'auto' or 'off'", _milliseconds),
    "path": ("a path", _path),
    "switch": ("True or False", _one_of(bool)),
    "names": ("a tuple of strings", _tuple_of(_text)),
    "texts": ("a tuple of strings", _tuple_of(_text)),
    "pairs": ("a tuple of NAME=VALUE strings", _tuple_of(_pair)),
    "ints": ("a tuple of whole numbers", _tuple_of(_int)),
    "biases": ("a mapping of token ids to numbers", _biases),
    "structured": ("a StructuredOutput", _one_of(StructuredOutput)),
}


def in_its_type(kind: Kind, value: Any) -> Any:
    """Convert a value to the Python type of ``kind``. Raises TypeError if it is invalid."""
    what, taken = _TYPES[kind]
    try:
        return taken(value)
    except (TypeError, ValueError):
        raise TypeError(what) from None


def check_count(name: str, value: Any, all_of: str) -> None:
    """Raise InvalidRequest unless ``count`` is None or between 1 and 2^31 - 1."""
    if value is None:
        return
    try:
        count = _int(value)
    except TypeError:
        raise InvalidRequest(
            f"{name} must be a whole number, got {value!r}; leave it out for {all_of}"
        ) from None
    if not 1 <= count < 2**31:
        rule = "at least 1" if count < 1 else "less than 2^31"
        raise InvalidRequest(f"{name} must be {rule}, got {count}; leave it out for {all_of}")
