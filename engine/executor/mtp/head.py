"""The MTP head: one more decoder layer, which reads a hidden state and the next token.

    x = projection([embedding_norm(embed(t[i + 1])), hidden_norm(h[i])])
    y[i] = norm(layer(x)),  logits of t[i + 2] = output(y[i])

Source: DeepSeek-V3 technical report, 2.2. Here h is the input of the model's output head.
Further drafts use y in place of h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from ...api.errors import ModelLoadError
from ...memory.configuration import text_config
from ...memory.model_files import read_config
from ..base import RunOutput, with_failures
from ..batch import Batch, OutputSelection
from ..mlx_lm_import import base
from ..mlx_lm_import import utils as mlx_lm_utils
from ..paged_model import PagedModel
from ..row_inputs import RowInputs
from ..sampling.logit_rows import Sampler
from ..sampling.sampler import SampleState
from .checkpoint import HeadWeights, read_head

HIDDEN = "hidden"  # name of the row input with the model's hidden states
_Rows = Callable[[mx.array], mx.array]

_ONE_LAYER = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "full_attention_interval": 1,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


class MTPLayer(Module):
    def __init__(self, layer: Module, weights: HeadWeights, *, eps: float, embed: _Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding_norm = _norm(weights.embedding_norm, eps)
        self.hidden_norm = _norm(weights.hidden_norm, eps)
        self.norm = _norm(weights.norm, eps)
        self.projection = Linear(1, 1, bias=False)
        self.projection.weight = weights.projection
        self.layer = layer
        self.quant_predicate: Any = None
        self._embed = embed
        self.row_inputs = RowInputs()

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        embedded = self._embed(tokens)
        given = self.row_inputs.get(HIDDEN)
        hidden = mx.zeros_like(embedded) if given is None else given[:, None].astype(embedded.dtype)
        x = self.projection(
            mx.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        )
        place = None if cache is None else cache[0]
        mask = base.create_attention_mask(x, place, return_array=True)
        out: mx.array = self.norm(self.layer(x, mask, place))
        return out


class MTPModel(Module):
    def __init__(self, body: MTPLayer, output: _Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.body = body
        self._output = output

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self._output(self.body(tokens, cache))


def load_head(path: Path, model: Module) -> MTPModel:
    """Load the MTP head of a checkpoint. Raises InvalidConfig or ModelLoadError."""
    config = read_config(path)
    weights = read_head(path, config)
    whole = _one_layer_model(config, weights)
    owner: Any = getattr(model, "language_model", model)
    embedding = owner.model.embed_tokens

    def embed(tokens: mx.array) -> mx.array:
        embedded: mx.array = embedding(tokens)
        return embedded

    def output(x: mx.array) -> mx.array:
        logits: mx.array = owner.lm_head(x) if "lm_head" in owner else embedding.as_linear(x)
        return logits

    body = MTPLayer(
        whole.layers[0],
        weights,
        eps=float(text_config(config)["rms_norm_eps"]),
        embed=embed,
    )
    body.quant_predicate = getattr(whole, "quant_predicate", None)
    body.eval()
    return MTPModel(body, output)


def _one_layer_model(config: Mapping[str, Any], weights: HeadWeights) -> Any:
    settings = _one_layer(config)
    architecture = config["model_type"]
    try:
        model_class, args_class = mlx_lm_utils._get_classes(config=settings)
        whole = model_class(args_class.from_dict(settings))
        named = whole.sanitize({f"model.layers.0.{name}": value for name, value in weights.layer.items()})
        found = {name.partition("layers.0.")[2]: value for name, value in named.items()} | weights.layer_norms
        whole.layers[0].load_weights(list(found.items()), strict=True)
    except Exception as error:  # model code can raise anything
        first_line = str(error).partition("\n")[0] or type(error).__name__
        raise ModelLoadError(
            f"mlx-lm's {architecture!r} does not take the weights of the head for multi-token prediction: "
            f"{first_line}; choose ngram, suffix or draft:PATH"
        ) from error
    return whole


def _one_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    changed = {name: _ONE_LAYER.get(name, value) for name, value in config.items()}
    if isinstance(nested := changed.get("text_config"), dict):
        changed["text_config"] = _one_layer(nested)
    return changed


def _norm(weight: mx.array, eps: float) -> RMSNorm:
    norm = RMSNorm(weight.shape[-1], eps=eps)
    norm.weight = weight
    return norm


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPRunner:
    head: MTPModel
    paged: PagedModel
    sampling: Sampler
    num_pages: int
    page_size: int
    max_model_len: int

    def run(self, batch: Batch, hidden: npt.NDArray[np.float32], states: Sequence[SampleState]) -> RunOutput:
        batch = batch._replace(inputs={HIDDEN: hidden})
        rows = batch.sample_rows
        outputs = self.paged.forward(batch, OutputSelection(rows, hidden=rows))
        self.paged.evaluate(outputs.arrays)
        failed = self.paged.nonfinite_rows()
        if outputs.logits is None or outputs.hidden is None:
            return RunOutput((), tuple(failed))
        sampled = list(self.sampling.sample(outputs.logits, range(len(states)), states))
        return RunOutput(
            with_failures(sampled, batch, failed), tuple(failed), hidden=np.array(outputs.hidden)
        )
