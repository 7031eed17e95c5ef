"""Loading weights with mlx-lm's own code, re-quantizing them if asked, on the engine thread."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map

from octavo.kernels.channel_weights import BITS as CHANNEL_BITS

from ...api.config import Weights
from ...api.errors import InvalidConfig, ModelLoadError
from ...memory.model_files import read_config
from ..adapt.cache_adapter import install_hook
from ..adapt.install import adapt_models
from ..model_ops import MLXOps, ModelOps
from ..recurrent.cut_points import install_cut_points
from .channel_layers import affine_arrays, can_become, channel_kind, put_channels
from .mlx_lm_import import utils as mlx_lm_utils

if TYPE_CHECKING:
    from ..native.modules import Report

log = logging.getLogger(__name__)

GROUP_SIZE = 64
_BITS = {"int8": 8, "int4": 4, **CHANNEL_BITS}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A hooked model whose weights are still on disk until ``materialize``. ``weights`` says
    what its linear layers compute with."""

    model: Module
    architecture: str
    weights: str


def load_model(path: Path, *, weights: Weights, ops: ModelOps | None = None) -> LoadedModel:
    """The model of ``path`` by mlx-lm's own code, with the hook in place, its weights not read until
    ``materialize``. ``ops`` None: MLX's own.

    Raises ModelLoadError when mlx-lm cannot load it, InvalidConfig when its weights cannot
    become what was asked.
    """
    ops, said = MLXOps() if ops is None else ops, StringIO()
    architecture = read_config(path)["model_type"]
    install_hook()
    try:
        with ops.loading(), redirect_stdout(said):
            model, _ = mlx_lm_utils.load_model(path, lazy=True)
    except SystemExit as error:  # olmo, without a package of its own
        first_line = said.getvalue().strip().partition("\n")[0] or f"it exits with {error.code}"
        raise ModelLoadError(
            f"mlx-lm cannot load {architecture!r} models as it is installed here: {first_line}"
        ) from error
    except Exception as error:  # mlx-lm and model code of any architecture
        first_line = str(error).partition("\n")[0] or type(error).__name__
        raise ModelLoadError(f"mlx-lm cannot load the model in {path}: {first_line}") from error
    adapt_models()
    install_cut_points()
    model.eval()
    if weights != "keep":
        convert_weights(model, weights, ops)
    return LoadedModel(model, architecture, describe_weights(model))


def materialize(model: Module, ops: ModelOps, *, exact: bool, fuse: bool) -> Report | None:
    """Read the weights, the model being prepared by ``ops`` first, layer by layer, so that the originals of
    converted weights are never all in memory. ``exact``, ``fuse``: see ``ModelOps.prepare_model``."""
    report = ops.prepare_model(model, exact=exact, fuse=fuse)
    for parameter in dict(tree_flatten(model.parameters())).values():
        mx.eval(parameter)
    return report


def convert_weights(model: Module, weights: Weights, ops: ModelOps) -> None:
    """Cast to bf16, or quantize every layer that can be: to MLX affine groups of 64, or ("w8a8", "w4a8") to
    those of one scale per output channel, which layers that have as many bits already may become, too.

    As in mlx-lm's own conversion, a model may exempt layers or choose their bits. Layers
    whose input is not a multiple of 64 wide stay as they are.
    """
    bits = CHANNEL_BITS.get(weights)
    by_channels = {
        path: affine_arrays(module) for path, module in model.named_modules() if can_become(module, weights)
    }
    if is_quantized(model) and not by_channels:
        but = f" in other than {bits} bits" if bits else ""
        raise InvalidConfig(
            f"weights={weights!r} cannot be made from weights that are quantized already{but}; "
            "use weights='keep'"
        )
    if weights == "bf16":
        model.update(tree_map(_as_bf16, model.parameters()))
        return
    rule = getattr(model, "quant_predicate", None)

    def chosen(path: str, module: Module) -> bool | dict[str, object]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % GROUP_SIZE:
            return False
        choice: bool | dict[str, object] = True if rule is None else rule(path, module)
        if bits and choice is True:
            by_channels[path] = (module.weight,)
        return choice

    with ops.quantizing():
        quantize(model, GROUP_SIZE, _BITS[weights], class_predicate=chosen)
    for path, module in model.named_modules():
        if path in by_channels:
            put_channels(module, by_channels[path], weights, ops)
    if not is_quantized(model):
        raise InvalidConfig(
            f"weights={weights!r} needs layers whose width is a multiple of {GROUP_SIZE}; "
            "this model has none, use weights='keep'"
        )


def is_quantized(model: Module) -> bool:
    return any(hasattr(module, "bits") and "scales" in module for _, module in model.named_modules())


def describe_weights(model: Module) -> str:
    """What most parameters are: "int4", "w8a8", "w4a8", "mxfp4", "bf16", "fp16" or "fp32"."""
    sizes: Counter[str] = Counter()
    for _, module in model.named_modules():
        if not isinstance(module.get("weight"), mx.array):
            continue
        if hasattr(module, "bits") and "scales" in module:
            mode = getattr(module, "mode", "affine")
            name = f"int{module.bits}" if mode == "affine" else mode
            name = channel_kind(module) or name
            sizes[name] += module.weight.size * 32 // module.bits
        else:
            sizes[_DTYPE_NAMES.get(module.weight.dtype, str(module.weight.dtype))] += module.weight.size
    return sizes.most_common(1)[0][0] if sizes else "none"


_DTYPE_NAMES = {mx.bfloat16: "bf16", mx.float16: "fp16", mx.float32: "fp32"}


def _as_bf16(value: mx.array) -> mx.array:
    return value.astype(mx.bfloat16) if mx.issubdtype(value.dtype, mx.floating) else value
