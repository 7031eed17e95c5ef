from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.kernels.backends import BackendSelection, choose_backend, set_up_device
from octavo.kernels.interface import AttentionBackend

from ...api.config import EngineConfig
from ...api.errors import InvalidConfig
from ..adapt.output_head import RowSelection, select_rows
from ..cache_layout import CacheLayout
from ..freed_memory import give_freed_memory_back, nothing_cached
from ..model_ops import Fusion, ModelOps
from ..paged_model import PagedModel
from ..recurrent.recurrences import recurrences_of
from ..recurrent.state_pool import StatePool
from .equivalence_check import NUM_PAGES, NUM_ROWS, FusionResult, check_fusion
from .loader import LoadedModel, materialize
from .probe import ProbeResult, plain_reference, probe
from .probe_reference import Reference
from .probe_steps import probe_cache

if TYPE_CHECKING:
    from ..model_ops import Report

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyModel:
    selection: RowSelection
    report: Report | None
    result: ProbeResult
    fusion: FusionResult | None

    @property
    def replays(self) -> bool:
        return self.fusion is not None and not self.fusion.not_replayed

    @property
    def fused_argmax(self) -> bool:
        return self.fusion is not None and not self.fusion.stores_logits


def choose_device(config: EngineConfig) -> BackendSelection:
    try:
        choice = choose_backend(config.backend, config.threads, exact=config.exact)
    except ValueError as error:
        raise InvalidConfig(str(error)) from error
    set_up_device()
    return choice


def model_ops(backend: AttentionBackend) -> ModelOps:
    if backend.has_model_ops:
        from ..native.model_ops import NativeOps

        return NativeOps()
    return ModelOps()


def make_ready(
    loaded: LoadedModel,
    layout: CacheLayout,
    choice: BackendSelection,
    *,
    exact: bool,
    fuse: bool = True,
) -> ReadyModel:
    """Read the weights, replace modules, run the probe. Raises ModelLoadError if steps give wrong results."""
    model, ops = loaded.model, model_ops(choice.backend)
    selection = select_rows(model, vocab_size=layout.vocab_size, take=ops.take_rows)
    gc.collect()  # cycles would keep weights alive
    references: list[Reference] = []

    def refer() -> None:
        with nothing_cached(choice.backend.name):
            references.append(plain_reference(model, layout, loaded.architecture))

    report = materialize(model, ops, exact=exact, fuse=fuse, reference=refer)
    give_freed_memory_back(choice.backend.name)
    with nothing_cached(choice.backend.name):
        result = probe(
            model,
            layout,
            choice.backend,
            selection,
            architecture=loaded.architecture,
            reference=references[0],
            recurrences=recurrences_of(choice.backend) if layout.mixers else None,
        )
    give_freed_memory_back(choice.backend.name)
    fusion = None
    if ops.fusion is not None and fuse:
        chosen = selection if result.selects_rows else None
        fusion = _checked_fusion(ops.fusion, loaded, layout, choice, chosen, result)
        give_freed_memory_back(choice.backend.name)
    return ReadyModel(selection, report, result, fusion)


def _checked_fusion(
    fusing: Fusion,
    loaded: LoadedModel,
    layout: CacheLayout,
    choice: BackendSelection,
    selection: RowSelection | None,
    result: ProbeResult,
) -> FusionResult:
    def create(replay: bool) -> PagedModel:
        recurrent = result.recurrent
        return PagedModel(
            loaded.model,
            layout,
            probe_cache(choice.backend, layout, NUM_PAGES),
            selection=selection,
            replay=replay,
            recurrent=recurrent,
            states=None if recurrent is None else StatePool(NUM_ROWS, result.entries),
        )

    fusion = check_fusion(create, lambda on: fusing.set_fused(loaded.model, on), layout.vocab_size)
    if fusion.not_fused:
        log.warning("%s runs without fused operations: %s", loaded.architecture, fusion.not_fused)
        fusing.unfuse(loaded.model)
    if fusion.not_replayed:
        log.warning(
            "%s cannot be captured as a program, so its Python code runs in every step, which is slower: %s",
            loaded.architecture,
            fusion.not_replayed,
        )
    if fusion.stores_logits:
        log.info("%s stores logits even for greedy tokens: %s", loaded.architecture, fusion.stores_logits)
    return fusion
