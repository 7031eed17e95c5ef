"""Loading of weights with mlx-lm's code, with optional quantization."""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from octavo.kernels.channel_weights import BITS as CHANNEL_BITS

from ...api.config import Weights
from ...api.errors import InvalidConfig, ModelLoadError
from ...memory.budget import tensors_of
from ...memory.draft_memory import ObservedCaches
from ...memory.model_files import read_config
from ...memory.weight_files import weight_files
from ..adapt.cache_adapter import install_hook
from ..adapt.install import adapt_models
from ..adapters.layers import num_values
from ..mlx_lm_import import utils as mlx_lm_utils
from ..model_ops import ModelOps
from ..recurrent.cut_points import install_cut_points
from .config_check import check_dtype, check_keys, recorded, watched
from .discover import discover_layout
from .rope_check import match_rope

if TYPE_CHECKING:
    from ..model_ops import Report

log = logging.getLogger(__name__)

GROUP_SIZE = 64
_MODELOPT = "hf_quant_config.json"  # written by NVIDIA's ModelOpt
_MAX_NAMED = 5
_LLAMAS = ("idefics3", "smolvlm")
_LLAVA = {"model_type": "llava"}
_TEXT_PREFIX = re.compile(r"^(model\.text_model|language_model)\.(?!lm_head)")
_OF_PICTURES = re.compile(r"(model\.)?(vision_model|connector)\.")
_BITS = {"int8": 8, "int4": 4, **CHANNEL_BITS}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Module
    architecture: str
    weights: str


def load_model(
    path: Path,
    *,
    weights: Weights,
    ops: ModelOps | None = None,
    change: Callable[[Module], None] | None = None,
) -> LoadedModel:
    """Load the model of ``path`` with patched attention. Its weights are read later, by ``materialize``.

    Raises ModelLoadError or InvalidConfig.
    """
    ops, said = ops or ModelOps(), StringIO()
    config = read_config(path)
    _say_tied(config, path)
    architecture = config["model_type"]
    install_hook()
    try:
        with (
            ops.loading(),
            redirect_stdout(said),
            folder_for_mlx_lm(path, config) as folder,
            recorded() as read,
        ):
            model, _ = mlx_lm_utils.load_model(folder, lazy=True, get_model_classes=model_classes)
    except SystemExit as error:  # olmo's module exits if a package is missing
        first_line = said.getvalue().strip().partition("\n")[0] or f"its module exits with {error.code}"
        raise ModelLoadError(
            f"the installed mlx-lm cannot load {architecture!r} models: {first_line}"
        ) from error
    except ModelLoadError:
        raise
    except Exception as error:  # model code can raise anything
        raise ModelLoadError(f"mlx-lm cannot load the model in {path}: {_in_one_line(error)}") from error
    if warnings := " ".join(said.getvalue().split()):
        log.warning("%s: mlx-lm says: %s", path, warnings)
    check_keys(config, model, read, str(path / "config.json"))
    match_rope(model, config, read, str(path / "config.json"))
    adapt_models()
    install_cut_points()
    model.eval()
    if change is not None:
        change(model)
    if weights != "keep":
        convert_weights(model, weights, ops)
    check_dtype(config, model, str(path / "config.json"))
    return LoadedModel(model, architecture, describe_weights(model))


def _say_tied(config: dict[str, Any], path: Path) -> None:
    nested = config.get("text_config")
    language: dict[str, Any] = nested if isinstance(nested, dict) else config
    if "tie_word_embeddings" in config or "tie_word_embeddings" in language:
        return
    if any(name.endswith("lm_head.weight") for file in weight_files(path) for name in tensors_of(file)):
        language["tie_word_embeddings"] = False


def model_classes(config: dict[str, Any]) -> tuple[type[Module], Any]:
    is_llama = config["model_type"] in _LLAMAS
    model_class, arguments = mlx_lm_utils._get_classes(config | _LLAVA if is_llama else config)
    return _llama_of(model_class) if is_llama else model_class, watched(arguments)


def _llama_of(kind: Any) -> Any:
    def sanitize(model: Any, weights: dict[str, mx.array]) -> Any:
        names = [name for name in weights if not _OF_PICTURES.match(name)]
        return kind.sanitize(model, {_TEXT_PREFIX.sub("model.", name): weights[name] for name in names})

    return type(kind.__name__, (kind,), {"sanitize": sanitize})


def _in_one_line(error: Exception) -> str:
    head, *lines = [line.strip().rstrip(",.") for line in str(error).splitlines()] or [""]
    lines = [line for line in lines if line]
    more = f" and {len(lines) - _MAX_NAMED} more" if len(lines) > _MAX_NAMED else ""
    return f"{head} {', '.join(lines[:_MAX_NAMED])}{more}".strip() or type(error).__name__


@contextmanager
def folder_for_mlx_lm(path: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """Make a temporary folder with ``config`` and links to the weight files."""
    with tempfile.TemporaryDirectory(prefix="octavo-model-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for index, file in enumerate(weight_files(path)):
            (folder / f"model-{index:05}.safetensors").symlink_to(file.resolve())
        if (other := path / _MODELOPT).exists():
            (folder / _MODELOPT).symlink_to(other.resolve())
        yield folder


def materialize(
    model: Module, ops: ModelOps, *, exact: bool, fuse: bool, reference: Callable[[], None] = lambda: None
) -> Report | None:
    report = ops.prepare_model(model, exact=exact, fuse=fuse, reference=reference)
    for parameter in dict(tree_flatten(model.parameters())).values():
        mx.eval(parameter)
    return report


def convert_weights(model: Module, weights: Weights, ops: ModelOps) -> None:
    """Cast to bf16, or quantize every suitable layer, as mlx-lm does.

    "w8a8" and "w4a8" have one scale per output channel; other formats have MLX's affine groups of 64.
    """
    bits = CHANNEL_BITS.get(weights)
    by_channels = {
        path: affine_arrays(module) for path, module in model.named_modules() if can_become(module, weights)
    }
    if is_quantized(model) and not by_channels:
        but = f", except from those of {bits} bits" if bits else ""
        raise InvalidConfig(
            f"weights={weights!r} cannot be made from quantized weights{but}; use weights='keep'"
        )
    if weights == "bf16":
        model.set_dtype(mx.bfloat16)
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
            f"weights={weights!r} needs layers whose width is a multiple of {GROUP_SIZE}, and this model has "
            "none; use weights='keep'"
        )


def is_quantized(model: Module) -> bool:
    return any(hasattr(module, "bits") and "scales" in module for _, module in model.named_modules())


def describe_weights(model: Module) -> str:
    """Return the format of most parameters: "int4", "w8a8", "w4a8", "mxfp4", "bf16", "fp16" or "fp32"."""
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


def can_become(module: Module, kind: str) -> bool:
    bits, mode = getattr(module, "bits", None), getattr(module, "mode", "affine")
    return bits is not None and mode == "affine" and bits == CHANNEL_BITS.get(kind)


def affine_arrays(module: Any) -> tuple[mx.array, ...]:
    return module.weight, module.scales, module.biases


def put_channels(module: Any, arrays: tuple[mx.array, ...], kind: str, ops: ModelOps) -> None:
    module.weight, module.scales, module.biases = ops.quantize_channels(kind, arrays, module.group_size)
    module.channel_kind = kind


def channel_kind(module: Module) -> str | None:
    kind: str | None = getattr(module, "channel_kind", None)
    return kind


def observe_caches(path: Path) -> ObservedCaches:
    """Return the caches of a model folder without reading its weights. Raises ModelLoadError."""
    loaded = load_model(path, weights="keep")
    layout = discover_layout(loaded.model, loaded.architecture)
    return ObservedCaches(layout.layers, layout.slot_bytes, num_values(loaded.model))
