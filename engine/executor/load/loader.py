"""Loading weights with mlx-lm's own code, re-quantizing them if asked, on the engine thread."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map

from ...api.config import Weights
from ...api.errors import InvalidConfig, ModelLoadError
from ...memory.model_files import read_config
from ..adapt.cache_adapter import install_hook
from .mlx_lm_import import utils as mlx_lm_utils

if TYPE_CHECKING:
    from ..native.modules import Report

log = logging.getLogger(__name__)

GROUP_SIZE = 64
_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A hooked model whose weights are still on disk until ``materialize``. ``weights`` says
    what its linear layers compute with."""

    model: Module
    architecture: str
    weights: str


@contextmanager
def _weights_mapped(native: bool) -> Iterator[None]:
    """In this block, mlx-lm gets weights that are mapped from their files and not read, if ``native``."""
    if not native:
        yield
        return
    from ..native.mapped import map_safetensors

    original = mx.load

    def load(file: Any, *unusual: Any, **more: Any) -> Any:
        plain = not unusual and not more and str(file).endswith(".safetensors")
        mapped = map_safetensors(file) if plain else None
        return original(file, *unusual, **more) if mapped is None else mapped

    mx.load = load
    try:
        yield
    finally:
        mx.load = original


@contextmanager
def _quantized_on_all_threads(native: bool) -> Iterator[None]:
    """In this block, layers that quantize themselves do it with our kernel, if ``native``: the bits of
    MLX's, which takes one thread and most of the time of loading."""
    if not native:
        yield
        return
    from octavo.kernels import _ext

    original = mx.quantize

    def quantize_array(w: Any, *settings: Any, **more: Any) -> Any:
        ours = [(GROUP_SIZE, bits) for bits in _BITS.values()]
        if settings in ours and more == {"mode": "affine"}:
            return _ext.quantize_weights(w, group_size=settings[0], bits=settings[1])
        return original(w, *settings, **more)

    mx.quantize = quantize_array
    try:
        yield
    finally:
        mx.quantize = original


def load_model(path: Path, *, weights: Weights, native: bool = False) -> LoadedModel:
    """The model of ``path`` by mlx-lm's own code, with the hook in place. ``native``: its weights are
    views of their files until ``materialize``.

    Raises ModelLoadError when mlx-lm cannot load it, InvalidConfig when its weights cannot
    become what was asked.
    """
    architecture = read_config(path)["model_type"]
    install_hook()
    try:
        with _weights_mapped(native):
            model, _ = mlx_lm_utils.load_model(path, lazy=True)
    except Exception as error:  # mlx-lm and model code of any architecture
        first_line = str(error).partition("\n")[0] or type(error).__name__
        raise ModelLoadError(f"mlx-lm cannot load the model in {path}: {first_line}") from error
    install_hook()
    model.eval()
    if weights != "keep":
        with _quantized_on_all_threads(native):
            convert_weights(model, weights)
    return LoadedModel(model, architecture, describe_weights(model))


def materialize(model: Module, *, native: bool, exact: bool, fuse: bool) -> Report | None:
    """Read the weights; ``native`` first puts the CPU kernels in the place of MLX's layers, and
    gives a report of it. ``fuse``: operations of several modules may become one.

    Layer by layer, so that the originals of converted weights are never all in memory.
    """
    report = None
    if native:
        from ..native.merged import Observed, observe
        from ..native.modules import replace_modules

        seen = observe(lambda: model(mx.array([[0, 1]])))
        if not fuse:
            seen = Observed(heads=seen.heads)
        report = replace_modules(model, exact=exact, fuse=fuse, observed=seen)
        log.info("native layers: %s; MLX's own: %s", report.replaced, [kept.name for kept in report.kept])
    if native:  # what is left may lie in the files
        from octavo.kernels import _ext

        model.update(tree_map(_ext.copy_of, model.parameters()))
    for parameter in dict(tree_flatten(model.parameters())).values():
        mx.eval(parameter)
    return report


def num_weight_bytes(model: Module, *, native: bool) -> int:
    """What the weights take now; ask after a first forward, which may pack the head."""
    own: int = sum(array.nbytes for array in dict(tree_flatten(model.parameters())).values())
    if not native:
        return own
    from ..native.modules import packed_bytes

    return own + packed_bytes(model)


def convert_weights(model: Module, weights: Weights) -> None:
    """Cast to bf16, or quantize every layer that can be to MLX affine groups of 64.

    As in mlx-lm's own conversion, a model may exempt layers or choose their bits. Layers
    whose input is not a multiple of 64 wide stay as they are.
    """
    if is_quantized(model):
        raise InvalidConfig(
            f"weights={weights!r} cannot be made from weights that are quantized already; use weights='keep'"
        )
    if weights == "bf16":
        model.update(tree_map(_as_bf16, model.parameters()))
        return
    rule = getattr(model, "quant_predicate", None)

    def chosen(path: str, module: Module) -> bool | dict[str, object]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % GROUP_SIZE:
            return False
        choice: bool | dict[str, object] = True if rule is None else rule(path, module)
        return choice

    quantize(model, GROUP_SIZE, _BITS[weights], class_predicate=chosen)
    if not is_quantized(model):
        raise InvalidConfig(
            f"weights={weights!r} needs layers whose width is a multiple of {GROUP_SIZE}; "
            "this model has none, use weights='keep'"
        )


def is_quantized(model: Module) -> bool:
    return any(hasattr(module, "bits") and "scales" in module for _, module in model.named_modules())


def describe_weights(model: Module) -> str:
    """What most parameters are: "int4", "mxfp4", "bf16", "fp16" or "fp32"."""
    sizes: Counter[str] = Counter()
    for _, module in model.named_modules():
        if not isinstance(module.get("weight"), mx.array):
            continue
        if hasattr(module, "bits") and "scales" in module:
            mode = getattr(module, "mode", "affine")
            sizes[f"int{module.bits}" if mode == "affine" else mode] += module.weight.size * 32 // module.bits
        else:
            sizes[_DTYPE_NAMES.get(module.weight.dtype, str(module.weight.dtype))] += module.weight.size
    return sizes.most_common(1)[0][0] if sizes else "none"


_DTYPE_NAMES = {mx.bfloat16: "bf16", mx.float16: "fp16", mx.float32: "fp32"}


def _as_bf16(value: mx.array) -> mx.array:
    return value.astype(mx.bfloat16) if mx.issubdtype(value.dtype, mx.floating) else value
