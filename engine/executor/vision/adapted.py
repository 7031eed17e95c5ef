from __future__ import annotations

from typing import Any

_CLASSES: dict[tuple[type, Any], type] = {}


def adapt(module: Any, state: Any, make: Any) -> None:
    """Give a module the methods that ``make`` returns, which read ``state`` as ``image_inputs``."""
    kind = type(module)
    object.__setattr__(module, "image_inputs", state)
    if (kind, make) not in _CLASSES:
        _CLASSES[kind, make] = type(kind.__name__, (kind,), make(kind))
    module.__class__ = _CLASSES[kind, make]
