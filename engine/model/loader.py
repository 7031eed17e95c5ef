"""Loading weights with mlx-lm's own code, re-quantizing them if asked, on the engine thread."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map

from octavo.engine.config import Weights
from octavo.engine.errors import InvalidConfig, ModelLoadError
from octavo.engine.model.locate import read_config


@contextmanager
def _open_files_limit_kept() -> Iterator[None]:
    """mlx-lm lowers the process's limit of open files to 2,048 when imported; a server needs
    its own."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    original = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = original
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


with _open_files_limit_kept():
    from mlx_lm import utils as mlx_lm_utils

    from octavo.engine.model.hook import install_hook

if TYPE_CHECKING:
    from octavo.kernels.cpu.modules import Report

GROUP_SIZE = 64
_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for its forward. ``weights`` says what its linear layers compute with,
    ``num_bytes`` what its parameters take, ``replaced`` which modules became native."""

    model: Module
    architecture: str
    weights: str
    num_bytes: int
    replaced: Report | None


def load_model(path: Path, *, weights: Weights, native: bool, exact: bool, fuse: bool) -> LoadedModel:
    """The model of ``path``, hooked and evaluated; ``native`` puts CPU kernels into it.

    Raises ModelLoadError when mlx-lm cannot load it, InvalidConfig when its weights cannot
    become what was asked.
    """
    config = read_config(path)
    architecture = config["model_type"]
    install_hook()
    try:
        model, _ = mlx_lm_utils.load_model(path, lazy=True)
    except Exception as error:  # mlx-lm and model code of any architecture
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelLoadError(f"mlx-lm cannot load the model in {path}: {first_line}") from error
    install_hook()
    model.eval()
    if weights != "keep":
        convert_weights(model, weights)
    name, replaced = describe_weights(model), None
    if native:
        from octavo.kernels.cpu.modules import replace_modules

        replaced = replace_modules(model, exact=exact, fuse=fuse)
    flat = dict(tree_flatten(model.parameters()))
    parameters = [array for array in flat.values() if isinstance(array, mx.array)]
    for parameter in parameters:  # one by one: what a conversion reads is dropped on the way
        mx.eval(parameter)
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    return LoadedModel(model, architecture, name, num_bytes, replaced)


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
