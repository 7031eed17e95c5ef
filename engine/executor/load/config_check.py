"""Check that a model was built with every setting of its config.json.

mlx-lm drops settings that it does not know. A dropped setting must be unknown to transformers or have
its default value; otherwise loading is refused.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from ...api.errors import ModelLoadError
from ...memory.configuration import sliding_windows, text_config
from ..mlx_lm_import import base

log = logging.getLogger(__name__)

# Keys without effect on the results.
_WITHOUT_EFFECT = re.compile(
    r"_.*|architectures|model_type|transformers_version|(torch_)?dtype|auto_map|tokenizer_class|name|"
    r"\w*token_(id|ids|index|list)|\w*_token|prefix|use_cache|cache_implementation|remove_invalid_values|"
    r"\w*init(ializer|ialization)?(_\w+)?|\w*dropout\w*|\w*_pdrop|drop_path_rate|\w*gradient_checkpoint\w*|"
    r"output_\w+|return_dict\w*|\w*loss\w*|\w*_coef|pretraining_tp|ep_size|seq_aux|\w*jitter\w*|"
    r"id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params|is_(encoder_)?decoder|"
    r"add_cross_attention|cross_attention_hidden_size|tie_encoder_decoder|\w*prun\w*|chunk_size_feed_forward|"
    r"(vision|visual|audio|image|video|mm|speech|projector|vit|talker|quantization|generation|sam)_?\w*|"
    r"(\w+_)?(vision|audio|image)_\w+|text_config|is_(mm|multimodal)\w*|"
    r"attn_implementation|\w*(flash|fused|kernel|triton|xla|tpu|parallel|offload|deepspeed|fsdp)\w*|"
    r"(num_)?(nextn|mtp)_\w+|num_nextn_predict_layers|(max|min)_(new_)?(length|tokens)|early_stopping|"
    r"num_beams|num_beam_groups|diversity_penalty|temperature|top_[kp]|typical_p|repetition_penalty|"
    r"length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids|num_return_sequences|"
    r"\w*fp32\w*|\w+_dtype|do_sample|begin_suppress_tokens|suppress_tokens|exponential_decay_length_penalty|unsloth\w*|license|"
    r"model_max_length|max_\w*(position|sequence|seq)\w*|n_positions|n_ctx|seq_length|original_max\w*"
)
_CHECKED_OTHERWISE = re.compile(
    r"rope_(theta|scaling|parameters|local_base_freq)|\w*window\w*|layer_types|(\w+_)?bias|"
    r"(intermediate|hidden|vocab)_size|num_key_value_heads|head_dim|tie_word_embeddings"
)
_ACTIVATIONS = {
    "silu": r"silu|swiglu", "swish": r"silu|swiglu",
    "relu": r"\brelu\b", "relu2": r"relu2|relu_squared|square",
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"), r"gelu|geglu"),
}  # fmt: skip
_GELU = {"gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"}
_DTYPES = {
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
    "half": mx.float16,
    "float32": mx.float32,
    "float": mx.float32,
}
_OTHER_DTYPES = re.compile(r"auto|float64|double|float8_\w+")  # types that MLX lacks on CPUs
_CAUSAL = {"is_causal": True, "use_bidirectional_attention": False}
_EFFECTLESS_VALUES: tuple[Any, ...] = (None, False, 0, 1, [], {}, "", "none", "default", "silu", "eager")

_readings: ContextVar[Readings | None] = ContextVar("octavo_config_readings", default=None)


class Readings:
    """Settings that mlx-lm read while it built a model."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.classes: set[type] = set()

    def note(self, arguments: type, params: Mapping[str, Any]) -> None:
        self.classes.add(arguments)
        self.taken |= inspect.signature(arguments).parameters.keys() & params.keys()


@contextmanager
def recorded() -> Iterator[Readings]:
    _install()
    readings = Readings()
    token = _readings.set(readings)
    try:
        yield readings
    finally:
        _readings.reset(token)


def watched(arguments: Any) -> Any:
    class Watched:
        @staticmethod
        def from_dict(params: dict[str, Any]) -> Any:
            if (readings := _readings.get()) is not None:
                readings.note(arguments, params)
            return arguments.from_dict(params)

    return Watched


@functools.cache
def _install() -> None:
    arguments: Any = base.BaseModelArgs
    original = arguments.from_dict.__func__

    def from_dict(cls: Any, params: dict[str, Any]) -> Any:
        if (readings := _readings.get()) is not None:
            readings.note(cls, params)
        return original(cls, params)

    arguments.from_dict = classmethod(functools.wraps(original)(from_dict))


def check_keys(config: Mapping[str, Any], model: Module, readings: Readings, origin: str) -> None:
    """Raise ModelLoadError for the first ignored setting that would change the model."""
    flat = text_config(config)
    sources = _sources(model, readings)
    used = {name for name in readings.taken if re.search(rf"""[.'"]{re.escape(name)}\b""", sources)}
    _check_layer_types(flat, origin, used)
    left_out = [
        name
        for name, value in flat.items()
        if not (_WITHOUT_EFFECT.fullmatch(name) or _CHECKED_OTHERWISE.fullmatch(name))
        and value not in (None, [], {})
        and name not in used
        and not (isinstance(value, str) and value in _ACTIVATIONS and re.search(_ACTIVATIONS[value], sources))
    ]
    if not left_out:
        return
    defaults = reference_defaults(flat.get("model_type"))
    known = _CAUSAL | (defaults or {})
    for name in left_out:
        value = flat[name]
        if name == "use_bidirectional_attention" and value == "vision":
            continue
        if name in known and not _is_same(value, known[name]):
            raise ModelLoadError(
                f"{name} in {origin} must be {known[name]!r}, got {value!r}: mlx-lm's "
                f"{config['model_type']!r} ignores this setting; serve a model without it"
            )
        if defaults is None and name not in known and not _looks_effectless(value):
            log.warning("%s: mlx-lm ignores %s, which the configuration sets to %r", origin, name, value)


def _check_layer_types(flat: Mapping[str, Any], origin: str, used: set[str]) -> None:
    kinds, count, is_used = flat.get("layer_types"), flat.get("num_hidden_layers"), "layer_types" in used
    if kinds is None:
        return
    if not isinstance(kinds, list) or (
        isinstance(count, int) and (len(kinds) < count or (len(kinds) > count and not is_used))
    ):
        raise ModelLoadError(
            f"layer_types in {origin} must be a list with the kind of each of the {count} layers, got "
            f"{len(kinds) if isinstance(kinds, list) else kinds!r}; correct it"
        )
    known = {"full_attention"} | ({"sliding_attention"} if sliding_windows(flat) else set())
    known |= {"linear_attention"} if "full_attention_interval" in used else set()
    if (
        is_used
        or known.issuperset(map(str, kinds))
        or (defaults := reference_defaults(flat.get("model_type"))) is None
    ):
        return
    known |= {*(defaults.get("layer_types") or ())}
    if others := [kind for kind in map(str, kinds) if kind not in known]:
        raise ModelLoadError(
            f"layer_types in {origin} must contain only {', '.join(sorted(known))}, got {others[0]!r}: "
            f"mlx-lm's {flat['model_type']!r} ignores this kind; serve a model without it"
        )


def check_dtype(config: Mapping[str, Any], model: Module, origin: str) -> None:
    """Warn if the weights have another type than config.json says. Raises ModelLoadError."""
    flat = text_config(config)
    name = next((key for key in ("dtype", "torch_dtype") if flat.get(key) is not None), None)
    if name is None or isinstance(flat[name], dict):
        return
    said = str(flat[name]).removeprefix("torch.")
    if said not in _DTYPES and not _OTHER_DTYPES.fullmatch(said):
        raise ModelLoadError(
            f"{name} in {origin} must be one of {', '.join(_DTYPES)}, got {said!r}; correct it"
        )
    sizes: Counter[mx.Dtype] = Counter()
    for array in dict(tree_flatten(model.parameters())).values():
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] += array.size
    if sizes and said in _DTYPES and (found := sizes.most_common(1)[0][0]) != _DTYPES[said]:
        kept = str(found).removeprefix("mlx.core.")
        log.warning("%s: %s is %s, but the weights are %s; they are not converted", origin, name, said, kept)


def _sources(model: Module, readings: Readings) -> str:
    kinds = readings.classes.union(type(module) for _, module in model.named_modules())
    names = {parent.__module__ for kind in kinds for parent in kind.__mro__}
    found = []
    for name in sorted(names):
        if name.startswith("mlx_lm.models."):
            code = inspect.getsource(sys.modules[name])
            found.append(re.sub(r"^    \w+: .*$", "", code, flags=re.MULTILINE))
    return "\n".join(found)


@functools.lru_cache(maxsize=8)
def reference_defaults(model_type: object) -> dict[str, Any] | None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        defaults: dict[str, Any] = CONFIG_MAPPING[str(model_type)]().to_dict()
    except Exception as error:
        log.debug("transformers has no defaults of %r: %s", model_type, error)
        return None
    return text_config(defaults)


def _is_same(value: object, default: object) -> bool:
    if value == default or (default is None and _looks_effectless(value)):
        return True
    return {value, default} <= _GELU if isinstance(value, str) and isinstance(default, str) else False


def _looks_effectless(value: object) -> bool:
    return any(value == one for one in _EFFECTLESS_VALUES) or isinstance(value, dict)
