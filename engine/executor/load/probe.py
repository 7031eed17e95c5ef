"""Parity probe at load: a model must give equal logits with pages and in plain mlx-lm.

Steps of three sequences run through a small pool of 16-bit pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from mlx.nn.layers.base import Module

from octavo.kernels.interface import AttentionBackend

from ...api.errors import ModelLoadError
from ..adapt.output_head import RowSelection
from ..batch import Batch, OutputSelection
from ..cache_layout import CacheLayout
from ..paged_model import PagedModel
from ..recurrent.entries import EntrySpec
from ..recurrent.mixers import describe_mixers
from ..recurrent.recurrences import Recurrences
from ..recurrent.recurrent_layers import RecurrentLayers
from ..recurrent.state_pool import StatePool
from .attention_check import find_mistake
from .probe_reference import Errors, Reference, evaluated, make_reference, row_errors, with_more_noise
from .probe_run import ComputedRows, TracedCache, compute_steps, find_dependence
from .probe_steps import num_pages, probe_cache, step_metadata

MAX_WINDOW = 256  # positions; longer attention windows are not tested
STEPS = ((4, 3, 0), (1, 1, 2), (4, 0, 1), (1, 0, 2))
"""New tokens of each sequence in each step."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    latents: bool
    gathers: bool
    selects_rows: bool
    error: float
    limit: float
    recurrent: RecurrentLayers | None = None
    entries: Mapping[str, EntrySpec] = field(default_factory=dict)


def probe(
    model: Module,
    layout: CacheLayout,
    backend: AttentionBackend,
    selection: RowSelection,
    *,
    architecture: str,
    reference: Reference | None = None,
    recurrences: Recurrences | None = None,
) -> ProbeResult:
    """Raise ModelLoadError unless steps through pages agree with plain forwards."""
    steps = _steps(layout)
    if reference is None:
        reference = plain_reference(model, layout, architecture)
    recurrent = None
    try:
        if layout.mixers:
            recurrent = RecurrentLayers(layout.mixers, recurrences)
            recurrent.compared = {}
        paged = _paged_model(model, layout, backend, reference, recurrent)
        computed = compute_steps(paged, reference.sequences, steps, longest=reference.longest)
        errors = _compare(computed, reference, steps)
        wrong = None if recurrent is None else recurrent.wrong_kernel()
        refusal = wrong or _judge(errors, reference)
        if refusal is not None and wrong is None and reference.num_noises == 1:
            reference = with_more_noise(reference, model)
            refusal = _judge(errors, reference)
        if refusal is not None:
            lengths = [len(tokens) for tokens in reference.sequences]
            refusal = "; ".join(filter(None, (refusal, find_mistake(paged, layout, lengths))))
        refusal = refusal or _find_wrong(computed, paged, layout, backend, reference)
    except Exception as error:  # model code may fail in any way
        refusal = _first_line(error)
    if refusal is not None:
        if recurrent is not None:
            recurrent.release()
        raise ModelLoadError(
            f"model type {architecture!r} computes different results with a paged cache ({refusal}), so it "
            "cannot be served; choose another model"
        )
    selects = _selects_rows(paged, selection, reference)
    if recurrent is not None and paged.states is not None:
        recurrent.settle(paged.states.computed_by)
    return ProbeResult(
        latents=bool(paged.context.latent_layers),
        gathers=paged.context.gathers,
        selects_rows=selects,
        error=float(np.concatenate(errors).max()),
        limit=reference.worst_limit,
        recurrent=recurrent,
        entries=paged.states.entries if paged.states is not None else {},
    )


def plain_reference(model: Module, layout: CacheLayout, architecture: str) -> Reference:
    try:
        return make_reference(model, layout, _steps(layout))
    except Exception as error:  # model code can raise anything
        raise ModelLoadError(
            f"model type {architecture!r} fails in mlx-lm itself on this device: {_first_line(error)}; "
            "the native CPU backend or other weights may work, for example weights='int8'"
        ) from error


def _steps(layout: CacheLayout) -> list[tuple[int, int, int]]:
    windows = [spec.window for spec in layout.layers if spec.window is not None]
    reachable = [window for window in windows if window <= MAX_WINDOW]
    first, *rest = STEPS
    return [(first[0] + max(reachable, default=0), *first[1:]), *rest]


def _paged_model(
    model: Module,
    layout: CacheLayout,
    backend: AttentionBackend,
    reference: Reference,
    recurrent: RecurrentLayers | None,
) -> PagedModel:
    count = len(reference.sequences)
    return PagedModel(
        model,
        layout,
        TracedCache(probe_cache(backend, layout, 1 + count * num_pages(reference.longest))),
        recurrent=recurrent,
        states=None if recurrent is None else StatePool(count + 1),
    )


def _find_wrong(
    computed: ComputedRows,
    paged: PagedModel,
    layout: CacheLayout,
    backend: AttentionBackend,
    reference: Reference,
) -> str | None:
    if paged.context.gathers and not backend.takes_masks:
        return f"its layers select positions to attend to, for which the {backend.name} backend has no kernel"
    alone = backend.has_model_ops and not layout.mixers
    dependence = find_dependence(
        computed, paged, reference.sequences, _steps(layout), layout.vocab_size, alone=alone
    )
    return dependence or find_mistake(paged, layout, [len(tokens) for tokens in reference.sequences])


def _compare(computed: ComputedRows, reference: Reference, steps: Sequence[tuple[int, ...]]) -> list[Errors]:
    errors = np.concatenate(
        [row_errors(got, expected) for got, expected in zip(computed.logits, reference.logits, strict=True)]
    )
    chunks = np.array([count for counts in zip(*steps, strict=True) for count in counts])
    is_decode = np.repeat(chunks == 1, chunks)
    return [errors[is_decode], errors[~is_decode]]


def _judge(groups: list[Errors], reference: Reference) -> str | None:
    for name, errors in zip(("decode", "prompt"), groups, strict=True):
        median, worst = float(np.median(errors)), float(errors.max())
        if not median <= reference.median_limit or not worst <= reference.worst_limit:  # also true for NaN
            return (
                f"logits of {name} rows have error {median:.2g} (worst {worst:.2g}), but rounding explains "
                f"only {reference.median_limit:.2g} (worst {reference.worst_limit:.2g})"
            )
    return None


def _selects_rows(paged: PagedModel, selection: RowSelection, reference: Reference) -> bool:
    tokens = reference.sequences[0][:4]
    metadata = step_metadata(
        [(0, 0, len(tokens))], num_sequences=len(reference.sequences), longest=reference.longest
    )
    ids, rows = np.array(tokens, np.int32), np.array([3, 1], np.int32)
    paged.selection = selection
    try:
        (chosen,) = paged.forward(Batch(ids, rows, metadata), OutputSelection(rows)).arrays
        paged.evaluate([chosen])
    except Exception:
        return False
    finally:
        paged.selection = None
    expected = reference.logits[0][rows]
    got = evaluated(chosen)
    return got.shape == expected.shape and bool(row_errors(got, expected).max() <= reference.worst_limit)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def describe(result: ProbeResult) -> str:
    head = "" if result.selects_rows else "; the output head computes every row"
    recurrent = "" if result.recurrent is None else f"; recurrent: {describe_mixers(result.recurrent.mixers)}"
    return f"error {result.error:.2g} of {result.limit:.2g} allowed{head}{recurrent}"
