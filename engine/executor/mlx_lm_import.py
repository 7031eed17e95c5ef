"""Import of mlx-lm without its command-line parts, which saves a second.

``import mlx_lm`` imports transformers, which model code does not need. The package is replaced by one that
imports them at the first use of its names.
"""

from __future__ import annotations

import builtins
import importlib.util
import resource
import sys
import threading
from types import ModuleType
from typing import Any

from mlx.nn.layers.positional_encoding import RoPE

from .overrides import replaced

PACKAGE = "mlx_lm"
_ABSENT = ("huggingface_hub", "tokenizer_utils")
_OWN_NAMES = ("__version__", "__all__")


class Absent:
    """Placeholder for a name from a module that is not imported. Calling it raises TypeError."""

    def __new__(cls, *_: object, **__: object) -> Absent:
        raise TypeError("this copy of an mlx-lm module cannot load tokenizers or download models")


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> type[Absent]:
        return Absent


class DeferredPackage(ModuleType):
    """Package whose ``__init__`` has not run. Its submodules can be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _OWN_NAMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with _running:
            if type(self) is DeferredPackage:
                _run(self)
        return getattr(self, name)


_running = threading.RLock()


def _run(package: ModuleType) -> None:
    assert package.__spec__ is not None
    assert package.__spec__.loader is not None
    package.__class__ = ModuleType
    try:
        package.__spec__.loader.exec_module(package)
    except BaseException:
        package.__class__ = DeferredPackage
        raise


def defer(name: str) -> None:
    """Defer the import of package ``name``, unless it is imported already."""
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"No module named {name!r}", name=name)
    package = importlib.util.module_from_spec(spec)
    package.__class__ = DeferredPackage
    sys.modules[name] = package


def copy_without(name: str, absent: tuple[str, ...]) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"No module named {name!r}", name=name)

    def import_(wanted: str, *args: Any, **kwargs: Any) -> ModuleType:
        return _Empty(wanted) if wanted in absent else __import__(wanted, *args, **kwargs)

    module = importlib.util.module_from_spec(spec)
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_}
    spec.loader.exec_module(module)
    return module


defer(PACKAGE)
_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # mlx-lm would lower it to 2,048
with replaced((resource, "setrlimit", lambda _: lambda *_: None)):
    from mlx_lm.models import base, cache, rope_utils

    utils: Any = copy_without(f"{PACKAGE}.utils", _ABSENT)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == _open_files

ROPES = (
    RoPE,
    rope_utils.Llama3RoPE,
    rope_utils.ProportionalRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)
"""Rotary embeddings whose frequencies are known."""

__all__ = ["ROPES", "Absent", "base", "cache", "copy_without", "defer", "rope_utils", "utils"]
