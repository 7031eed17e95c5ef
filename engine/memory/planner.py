from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.kernels.formats import FORMAT_NAMES, RECIPE, FormatPair, format_pair
from octavo.kernels.interface import LayerSpec
from octavo.kernels.residual import SIXTEEN_BITS

from ..api.config import EngineConfig
from ..api.errors import InvalidConfig
from .budget import (
    format_size,
    weights_bytes,
    workspace_bytes,
)
from .configuration import sliding_windows, text_config
from .draft_memory import ObservedCaches, draft_memory
from .model_files import model_length, read_config, resolve_model
from .sizing import Sizing, sizing, with_max_kv_size, with_windows
from .state_sizing import plan_states

ADAPTER_VALUE_BYTES = 2


def plan(
    *,
    model: str,
    memory: int,
    context: int | None = None,
    page_size: int = 32,
    formats: Sequence[FormatPair] = tuple(map(format_pair, (*FORMAT_NAMES, RECIPE))),
    residual: Mapping[str, Any] | None = None,
    max_kv_size: int | None = None,
    speculate: str = "off",
    adapters: Mapping[str, Any] | None = None,
    observe: Callable[[Path], ObservedCaches],
) -> dict[str, Any]:
    """Return the pages and sequences that fit into ``memory`` bytes, for each page format.

    memory     bytes for weights, workspace and pages
    context    positions per sequence; None: the model's length

    Other settings are as in EngineConfig. Raises InvalidConfig or ModelLoadError.
    """
    path = resolve_model(model)
    config = read_config(path)
    settings = EngineConfig(
        model=model,
        page_size=page_size,
        max_kv_size=max_kv_size,
        speculate=speculate,
        **(adapters or {}),
    )
    positions = model_length(config, context, setting="context", max_kv_size=max_kv_size)
    observed = observe(path)
    layers = with_windows(observed.layers, sliding_windows(config))
    if max_kv_size is not None:
        layers = with_max_kv_size(layers, max_kv_size=max_kv_size)
    weights, drafts = weights_bytes(path), draft_memory(settings, layers, observe)
    workspace = workspace_bytes(
        config,
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
        vocab_size=int(text_config(config).get("vocab_size", 0)),
    )
    budget = max(0, memory - weights - drafts.weights - workspace - settings.lora_bytes)
    rows: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    for pair in formats:
        try:
            is_exact = {pair.k, pair.v} <= set(SIXTEEN_BITS)
            asked = replace(settings, kv_format=str(pair), **({} if is_exact else residual or {}))
            size = replace(sizing(layers, asked, positions), draft_bytes=drafts.page_bytes(asked))
        except InvalidConfig as refusal:
            refused[str(pair)] = str(refusal)
        else:
            rows[str(pair)] = _format_plan(size, budget, positions, settings, observed)
    return {
        "model": model,
        "architecture": config["model_type"],
        "layers": len(layers),
        "kv_heads": layers[0].num_kv_heads if layers else 0,
        "head_dim": layers[0].head_dim if layers else 0,
        "latents": _latent_caches(observed.layers, config),
        "state_bytes_per_sequence": observed.slot_bytes,
        "memory_bytes": memory,
        "weights_bytes": weights,
        "draft_weights_bytes": drafts.weights,
        "workspace_bytes": workspace,
        "adapter_bytes": settings.lora_bytes,
        "max_loras": settings.max_loras if settings.lora_bytes else 0,
        "max_lora_rank": settings.max_lora_rank,
        "adapter_bytes_per_rank": observed.adapter_values * ADAPTER_VALUE_BYTES,
        "kv_bytes": budget,
        "context": positions,
        "page_size": page_size,
        "fits": any(row["pages"] for row in rows.values()),
        "formats": rows,
        "refused": refused,
    }


def _format_plan(
    size: Sizing, budget: int, positions: int, settings: EngineConfig, observed: ObservedCaches
) -> dict[str, Any]:
    states = None
    if observed.slot_bytes and budget:
        states = plan_states(
            replace(settings, kv_memory=budget),
            observed.slot_bytes,
            page_bytes=size.page_bytes,
            available=budget,
        )
    slots = 0 if states is None else states.num_slots
    running = 0 if states is None else slots
    if sum(size.group_bytes):
        pages = max(size.pages_within(budget - (0 if states is None else states.nbytes)), 0)
    else:
        pages = running * -(-positions // size.page_size)
    bytes_per_page = size.page_bytes
    groups: list[dict[str, Any]] = [
        {
            "window": group.window,
            "keep": group.keep,
            "residual": index >= len(size.groups),
            "layers": len(group.members),
            "bytes_per_page": group_bytes,
            "pages": group_pages,
            "pages_per_sequence": size.pages_per_sequence(index, positions),
        }
        for index, (group, group_bytes, group_pages) in enumerate(
            zip(size.all_groups, size.group_bytes, size.pages(pages), strict=True)
        )
    ]
    return {
        "bytes_per_token": bytes_per_page // size.page_size,
        "bytes_per_page": bytes_per_page,
        "pages": pages,
        "tokens": pages * size.page_size,
        "draft_bytes": size.draft_bytes(pages),
        "state_slots": slots,
        "sequences": min(
            *(group["pages"] // group["pages_per_sequence"] for group in groups),
            running if observed.slot_bytes else sys.maxsize,
        ),
        "groups": groups,
    }


def _seen(group: Mapping[str, Any]) -> str:
    if group["keep"]:
        return f"the first {group['keep']} positions and the last {group['window']}"
    return f"{group['window']} positions"


def render(result: Mapping[str, Any]) -> str:
    width = max(map(len, ("format", *result["formats"]))) + 2
    drafts = f"draft model {format_size(result['draft_weights_bytes'])}, "
    lines = [
        f"{result['model']} ({result['architecture']}): {_layers(result['layers'])} with K/V, "
        f"{result['kv_heads']} KV heads of {result['head_dim']}",
        f"memory {format_size(result['memory_bytes'])}: weights {format_size(result['weights_bytes'])}, "
        f"{drafts if result['draft_weights_bytes'] else ''}"
        f"workspace {format_size(result['workspace_bytes'])}, {_adapters(result)}"
        f"pages {format_size(result['kv_bytes'])}",
        "",
        f"{'format':<{width}}{'per token':>11}{'per page':>12}{'pages':>10}{'tokens':>12}"
        f"{'sequences of ' + str(result['context']):>22}",
    ]
    for name, row in result["formats"].items():
        lines.append(
            f"{name:<{width}}{format_size(row['bytes_per_token']):>11}{format_size(row['bytes_per_page']):>12}"
            f"{row['pages']:>10}{row['tokens']:>12}{row['sequences']:>22}"
        )
    groups: list[dict[str, Any]] = next(iter(result["formats"].values()), {"groups": []})["groups"]
    lines += _of_formats(
        (
            name,
            f"and {group['pages']} pages of 16 bits, {format_size(group['bytes_per_page'])} each, "
            f"{group['pages_per_sequence']} per sequence",
        )
        for name, row in result["formats"].items()
        for group in row["groups"]
        if group["residual"]
    )
    lines += _of_formats(
        (name, f"and {format_size(row['draft_bytes'])} for the draft model")
        for name, row in result["formats"].items()
        if row["draft_bytes"]
    )
    lines += [
        f"{group['layers']} layers see {_seen(group)}: {group['pages_per_sequence']} separate pages per "
        "sequence, whatever its length"
        for group in groups
        if group["window"] is not None and not group["residual"]
    ]
    if (latents := result["latents"]) is not None:
        own, dense = latents["bytes_per_token"], latents["dense_bytes_per_token"]
        lines.append(
            f"{latents['layers']} layers cache latents: {format_size(own)} per token in 16 bits, where "
            f"K and V of every head would be {format_size(dense)}, {dense / own:.1f} times as much"
        )
    if result["state_bytes_per_sequence"]:
        lines += _of_formats(
            (
                name,
                f"and {row['state_slots']} slots of recurrent state, "
                f"{format_size(result['state_bytes_per_sequence'])} per sequence",
            )
            for name, row in result["formats"].items()
        )
    lines += [f"not for this model: {reason}" for reason in result["refused"].values()]
    if not result["fits"]:
        lines.append("no memory is left for pages; give more memory, or a model with smaller weights")
    return "\n".join(lines)


def _adapters(result: Mapping[str, Any]) -> str:
    if not result["adapter_bytes"]:
        return ""
    rank = result["max_lora_rank"]
    return (
        f"adapters {format_size(result['adapter_bytes'])} (up to {result['max_loras']} in a step; one of "
        f"rank {rank} on all layers takes {format_size(rank * result['adapter_bytes_per_rank'])}), "
    )


def _layers(number: int) -> str:
    return "1 layer" if number == 1 else f"{number} layers"


def _of_formats(remarks: Iterable[tuple[str, str]]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, remark in remarks:
        names.setdefault(remark, []).append(name)
    return [f"{', '.join(of)}: {remark}" for remark, of in names.items()]


_DIMS = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_BYTES = 2  # bytes of a 16-bit value


def _latent_caches(layers: Sequence[LayerSpec], config: Mapping[str, Any]) -> dict[str, int] | None:
    flat = text_config(config)
    shape = (flat.get("kv_lora_rank"), flat.get("qk_rope_head_dim"))
    latent = [spec for spec in layers if spec.num_kv_heads == 1 and (spec.head_dim, spec.value_dim) == shape]
    if not latent or any(not isinstance(flat.get(name), int) for name in _DIMS):
        return None
    heads, *dims = (int(flat[name]) for name in _DIMS)
    return {
        "layers": len(latent),
        "bytes_per_token": sum(_BYTES * (spec.head_dim + spec.value_dim) for spec in latent),
        "dense_bytes_per_token": len(latent) * _BYTES * heads * sum(dims),
    }
