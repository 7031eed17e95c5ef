from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map

from octavo.engine.api.errors import ModelLoadError
from octavo.engine.executor.adapt.install import adapt_models
from octavo.engine.executor.cache_layout import CacheLayout
from octavo.engine.executor.load.discover import discover_layout
from octavo.engine.executor.load.loader import LoadedModel, describe_weights
from octavo.engine.executor.load.prepare import make_ready
from octavo.engine.executor.recurrent.cut_points import install_cut_points
from octavo.kernels.backends import BackendSelection
from octavo.kernels.interface import PoolSpec

from .configurations import configuration

MODELS = "mlx_lm.models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """How one architecture of mlx-lm is served.

    tier             "paged", "refused", or "not tried" if no tiny model can be made
    attention        "full", "window", "chunks", "latents" or "recurrent", or several of them
    bytes_per_token  K/V bytes of the tiny model per token, in 16-bit pages; None if not served
    reason           why the architecture is not served; empty if it is served
    """

    architecture: str
    tier: str
    attention: str = ""
    bytes_per_token: int | None = None
    reason: str = ""


def architectures() -> list[str]:
    """Return the modules of the installed mlx-lm that could be models, without importing them."""
    spec = find_spec(MODELS)
    assert spec is not None
    names = sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))
    return [name for name in names if name not in _SHARED]


_SHARED = {  # modules of mlx-lm that are not models
    *("activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline"),
    *("rope_utils", "ssm", "switch_layers"),
}


def examine(name: str, choice: BackendSelection) -> Examined:
    """Make a tiny model, load it as ``serve`` would, and return the result."""
    said = StringIO()
    try:
        with redirect_stdout(said):
            model = _tiny_model(name)
    except SystemExit:  # olmo exits if a package is missing
        return Examined(architecture=name, tier="not tried", reason=said.getvalue().strip())
    except Exception as error:  # model code can raise anything
        return Examined(architecture=name, tier="not tried", reason=_first_line(error))
    try:
        layout = discover_layout(model, name)
        loaded = LoadedModel(model, name, describe_weights(model))
        result = make_ready(loaded, layout, choice, exact=False, fuse=True).result
    except ModelLoadError as error:
        return Examined(architecture=name, tier="refused", reason=_first_line(error))
    except Exception as error:  # model code can raise anything
        return Examined(
            architecture=name, tier="refused", reason=f"it fails while loading: {_first_line(error)}"
        )
    return Examined(
        architecture=name,
        tier="paged",
        attention=", ".join(_kinds(layout, latents=result.latents)),
        bytes_per_token=_bytes_per_token(layout),
    )


def _tiny_model(name: str) -> Module:
    config = configuration(name)
    module: Any = importlib.import_module(f"{MODELS}.{name}")
    if not hasattr(module, "Model") or not hasattr(module, "ModelArgs"):
        raise ValueError("it is part of other models")
    mx.random.seed(0)
    model: Module = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_random, model.parameters()))
    adapt_models()
    install_cut_points()
    model.eval()
    return model


def _random(value: mx.array) -> mx.array:
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    return (value + 0.05 * mx.random.normal(value.shape)).astype(mx.bfloat16)


def _kinds(layout: CacheLayout, *, latents: bool) -> Iterator[str]:
    if latents:
        yield "latents"
    elif any(spec.window is None for spec in layout.layers):
        yield "full"
    if any(spec.window is not None and not spec.chunked for spec in layout.layers):
        yield "window"
    if any(spec.chunked for spec in layout.layers):
        yield "chunks"
    if layout.mixers:
        yield "recurrent"


def _bytes_per_token(layout: CacheLayout) -> int:
    spec = PoolSpec(layers=layout.layers, num_pages=1, page_size=1, k_format="bf16", v_format="bf16")
    return spec.page_bytes


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
