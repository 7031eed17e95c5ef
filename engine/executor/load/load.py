from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import mlx.core as mx
from mlx.nn.layers.base import Module

from octavo.block_manager import RecurrentState
from octavo.kernels.backends import BackendSelection, native_instructions, row_tile
from octavo.kernels.cpus import available_threads
from octavo.kernels.groups import without_unreached_windows
from octavo.kernels.interface import PagedKVCache, PoolSpec
from octavo.kernels.kv_cache import GroupedKVCache, create_kv_cache

from ...api.config import AUTO, EngineConfig
from ...api.engine_info import EngineInfo, MemoryBudget
from ...api.errors import InvalidConfig
from ...memory.budget import encoding_bytes, format_size, weights_bytes, workspace_bytes
from ...memory.configuration import sliding_windows
from ...memory.draft_memory import DraftMemory, draft_memory
from ...memory.model_files import model_length, read_config, resolve_model, served_name
from ...memory.sizing import Sizing, num_pages_for, sizing, with_max_kv_size, with_windows
from ...memory.state_sizing import draft_state_bytes, plan_states
from ..adapters.layers import RankLayers, padded_bytes
from ..adapters.slots import AdapterSlots, adapter_slots, load_modules
from ..cache_layout import CacheLayout
from ..freed_memory import give_freed_memory_back, nothing_cached
from ..model_runner import PagedRunner
from ..mtp.head import MTPRunner
from ..paged_model import PagedModel
from ..recurrent.entries import slot_bytes
from ..recurrent.mixers import describe_mixers
from ..recurrent.state_pool import StatePool
from ..row_inputs import RowInputs
from ..vision.encoder import CACHE_BYTES, ImageEncoder, adapt_language, load_encoder
from ..vision.families import read_rules
from .discover import discover_layout
from .drafters import load_mtp
from .loader import LoadedModel, load_model, observe_caches
from .metal_settings import prepare_device, set_memory_limits, usable_memory
from .page_loss import MAX_TEXT, ScoreText, choose_format
from .prepare import ReadyModel, choose_device, make_ready, model_ops
from .probe import ProbeResult, describe
from .warm_up import try_adapters, warm_up

log = logging.getLogger(__name__)

SCORED_AT_ONCE = 32
Made = TypeVar("Made")


class WholeModel:
    """A model in one process. Ranks override what differs for their part."""

    is_whole = True
    row_inputs: RowInputs | None = None
    gives_logits = True
    groups: Sequence[int] | None = None
    layers = RankLayers()
    rank = 0
    num_machines = 1
    whole: CacheLayout | None = None

    def available(self, usable: Callable[[int], int], weight_bytes: int) -> int:
        return usable(weight_bytes)

    def smallest(self, value: int) -> int:
        return value

    def by_all(self, make: Callable[[], Made]) -> Made:
        return make()

    def split(self, model: Module) -> None: ...

    def layouts(self, found: CacheLayout) -> tuple[CacheLayout, CacheLayout]:
        """Return the layouts of this part and of the whole model."""
        return found, found

    def slot_bytes(self, own: int) -> int:
        return own

    def own(
        self, found: CacheLayout, whole: CacheLayout, size: Sizing, sized: Callable[[CacheLayout], Sizing]
    ) -> tuple[CacheLayout, Sizing]:
        del found, sized
        return whole, size


WHOLE = WholeModel()


class _Room(NamedTuple):
    size: Sizing
    states: RecurrentState | None
    num_pages: int


def load_paged_runner(
    config: EngineConfig,
    *,
    is_draft: bool = False,
    score: ScoreText | None = None,
    part: WholeModel = WHOLE,
) -> PagedRunner:
    path = resolve_model(config.model, config.revision)
    max_model_len = model_length(read_config(path), config.max_model_len, max_kv_size=config.max_kv_size)
    weight_bytes = weights_bytes(path)
    prepare_device(config, read_config(path), weight_bytes)
    rules = None
    if config.vision and not is_draft:
        rules = read_rules(path, read_config(path), max_pixels=config.max_image_pixels)
    choice = choose_device(config)
    ops = model_ops(choice.backend)
    loaded = load_model(path, weights=config.weights, ops=ops, change=part.split)
    probed, layout = part.layouts(discover_layout(loaded.model, loaded.architecture))
    windowed = with_windows(layout.layers, sliding_windows(read_config(path)))
    if windowed != layout.layers:
        log.info("%s: mlx-lm ignores the sliding window; the page tables enforce it", config.model)
        layout = replace(layout, layers=windowed)
    if config.max_kv_size is not None:
        bounded = with_max_kv_size(layout.layers, max_kv_size=config.max_kv_size)
        layout = replace(layout, layers=bounded)
    if config.residual is not None and not layout.layers:
        if not config.residual_is_optional:
            log.warning("%s: no layer has KV pages, so settings of 16-bit pages have no effect", config.model)
        config = config.without_residual()
    adapter_bytes = 0 if is_draft else config.lora_bytes
    if adapter_bytes and not choice.backend.has_model_ops:
        has_kernels = choice.backend.adapter_tables is not None
        padded = padded_bytes(
            loaded.model, num_slots=config.max_loras, max_rank=config.max_lora_rank, experts_only=has_kernels
        )
        if padded:
            log.info(
                "%s: on this backend, MLX's own operations compute adapters%s", config.model,
                " of experts" if has_kernels else "",
            )  # fmt: skip
        adapter_bytes += padded + (adapter_bytes if has_kernels else 0)
    vision_bytes = 0
    if rules is not None and part.rank == 0:
        num_patches = rules.max_pixels // rules.patch**2
        vision_bytes = CACHE_BYTES + encoding_bytes(
            read_config(path), num_patches=num_patches, activation_bytes=layout.dtype.size
        )
    other_bytes = adapter_bytes + vision_bytes
    whole = part.whole or probed
    drafts = draft_memory(config, whole.layers, observe_caches)
    usable = part.available(lambda taken: usable_memory(taken + drafts.weights), weight_bytes)
    available = max(0, usable - other_bytes)
    if is_draft and layout.slot_bytes:
        config = replace(config, state_memory=draft_state_bytes(config, layout.slot_bytes))
    room = _room(config, layout, max_model_len, available, drafts, part)
    ready = make_ready(loaded, probed, choice, exact=config.exact)
    log.info("%s: %s", config.model, describe(ready.result))
    checked = _Checked(choice, loaded, ready, part, (probed, layout))
    written = part.slot_bytes(slot_bytes(ready.result.entries))
    settled = config
    if score is not None and layout.layers and (config.kv_format == AUTO or not config.has_exact_pages):
        trial = functools.partial(checked.trial, slot=written, max_model_len=max_model_len)
        with nothing_cached(choice.backend.name):
            settled = choose_format(config, lambda each: score(*part.by_all(lambda: trial(each))))
        give_freed_memory_back(choice.backend.name)
    elif config.kv_format == AUTO:
        settled = config.with_format("bf16")
    if settled != config:
        config = settled
        room = _room(config, layout, max_model_len, available, drafts, part)
    if room.states is not None and written != room.states.slot_bytes:
        states = _as_written(config, loaded.architecture, room.states, written, room.size)
        room = room._replace(states=states)
    made = checked.allocate(config, room, max_model_len, replay=ready.replays and not config.async_steps)
    model, storages = made.model, made.model.kv_cache.storages
    adapters = None
    if not is_draft:
        adapters = adapter_slots(config, loaded.model, model.row_inputs, choice.backend, part.layers)
    if adapters is not None and part.is_whole:
        load_modules(config, adapters)
    images = None
    if rules is not None:
        has_axes = adapt_language(loaded.model, read_config(path), model.row_inputs)
        if part.rank == 0:
            images = load_encoder(config, path, rules, ops, has_axes=has_axes)
    budget = MemoryBudget(
        weights=ops.weight_bytes(loaded.model),
        unread=ops.unread_weight_bytes(loaded.model),
        pages=sum(storage.nbytes for storage in storages),
        residual=sum(storage.nbytes for storage in storages[len(made.size.groups) :]),
        workspace=workspace_bytes(
            read_config(path),
            max_step_tokens=config.max_step_tokens,
            max_running=config.max_running,
            vocab_size=layout.vocab_size,
            activation_bytes=layout.dtype.size,
        ),
        states=0 if model.states is None else model.states.nbytes,
        drafts=room.size.draft_bytes(room.num_pages),
        adapters=adapter_bytes,
        vision=0 if images is None else images.nbytes + vision_bytes,
    )
    if not is_draft:
        set_memory_limits(budget.workspace)
    head = None
    if config.speculate == "mtp":
        head = load_mtp(
            config, choice, loaded, whole, ready, num_pages=room.num_pages, max_model_len=max_model_len
        )
    info = checked.info(config, room, budget, max_model_len)
    info = replace(info, adapters=() if adapters is None else adapters.infos(), images=rules)
    runner = checked.runner(config, made, info, head=head, adapters=adapters, images=images)
    if choice.backend.compiles_at_launch:
        warm_up(runner, max_step_tokens=config.max_step_tokens)
    if adapters is not None:
        try_adapters(runner)
    return runner


class _Made(NamedTuple):
    model: PagedModel
    layout: CacheLayout
    size: Sizing


@dataclass(frozen=True, slots=True)
class _Checked:
    """A loaded and checked model, before it has pages of a format."""

    choice: BackendSelection
    loaded: LoadedModel
    ready: ReadyModel
    part: WholeModel
    layouts: tuple[CacheLayout, CacheLayout]

    def allocate(
        self, config: EngineConfig, room: _Room, max_model_len: int, *, replay: bool = False
    ) -> _Made:
        part, result = self.part, self.ready.result
        own, size = part.own(*self.layouts, room.size, lambda own: sizing(own.layers, config, max_model_len))
        kv_cache: PagedKVCache = GroupedKVCache((), ())
        if own.layers:
            bounded = replace(own, layers=without_unreached_windows(own.layers, max_model_len))
            kv_cache = _create_kv_cache(config, self.choice, bounded, size, room.num_pages)
        model = PagedModel(
            self.loaded.model,
            own,
            kv_cache,
            selection=self.ready.selection if result.selects_rows else None,
            replay=replay,
            recurrent=result.recurrent,
            states=_state_pool(room.states, result) if room.states is not None and result.entries else None,
            row_inputs=part.row_inputs,
        )
        return _Made(model, own, size)

    def trial(
        self, config: EngineConfig, *, slot: int, max_model_len: int
    ) -> tuple[PagedRunner, EngineConfig]:
        length = min(MAX_TEXT, max_model_len)
        num_pages = -(-length // config.page_size) + 2
        config = replace(
            config, num_pages=num_pages, kv_memory=None, max_running=1, max_kv_size=None,
            speculate="off", max_step_tokens=SCORED_AT_ONCE, max_pinned_pages=0, cache_dir=None,
            cache_dir_bytes=None, remote_cache=None, save_dir=None, swap_memory=0,
            state_memory=8 * slot or None, async_steps=False,
        )  # fmt: skip
        size = sizing(self.layouts[1].layers, config, length)
        states = plan_states(config, slot, page_bytes=size.page_bytes, available=8 * slot)
        room = _Room(size, states, num_pages)
        made = self.allocate(config, room, length)
        info = self.info(config, room, MemoryBudget(weights=0, pages=0, workspace=0), length)
        return self.runner(config, made, info), config

    def runner(
        self,
        config: EngineConfig,
        made: _Made,
        info: EngineInfo,
        *,
        head: MTPRunner | None = None,
        adapters: AdapterSlots | None = None,
        images: ImageEncoder | None = None,
    ) -> PagedRunner:
        ready, part, backend = self.ready, self.part, self.choice.backend
        return PagedRunner(
            made.model,
            info,
            gathered_row_bytes=_gathered_row_bytes(made.layout, made.size) if ready.result.gathers else None,
            exact=config.exact,
            groups=part.groups,
            gives_logits=part.gives_logits,
            fused_argmax=ready.fused_argmax and part.is_whole,
            sampling=model_ops(backend).sampler(),
            on_device=part.is_whole and (not backend.has_model_ops or config.async_steps is True),
            feeds=config.async_steps is True or (config.async_steps is None and backend.writes_in_place),
            head=head,
            adapters=adapters,
            images=images,
        )

    def info(self, config: EngineConfig, room: _Room, budget: MemoryBudget, max_model_len: int) -> EngineInfo:
        backend, ready, layout = self.choice.backend.name, self.ready, self.layouts[1]
        recurrent, groups = ready.result.recurrent, room.size.page_groups(room.num_pages)
        return EngineInfo(
            name=(config.served_model_name or (served_name(config.model),))[0],
            embeds=ready.result.selects_rows,
            aliases=config.served_model_name[1:],
            chat_template=config.chat_template,
            path=resolve_model(config.model, config.revision),
            architecture=self.loaded.architecture,
            num_layers=len(layout.layers),
            vocab_size=layout.vocab_size,
            max_model_len=max_model_len,
            backend=backend,
            backend_reason=self.choice.reason,
            threads=native_instructions()[1] if backend == "cpu" else config.threads or available_threads(),
            weights=self.loaded.weights,
            kv_format=str(config.page_formats),
            page_size=config.page_size,
            num_pages=groups[0].num_pages,
            memory=budget,
            groups=groups,
            row_tile=row_tile(backend),
            residual_pages=0 if config.residual is None else config.residual.residual_pages,
            states=room.states,
            recurrent="" if recurrent is None else describe_mixers(recurrent.mixers),
            batch_invariant=ready.report is not None and not ready.report.kept,
        )


def _room(
    config: EngineConfig,
    layout: CacheLayout,
    max_model_len: int,
    available: int,
    drafts: DraftMemory,
    part: WholeModel,
) -> _Room:
    size = sizing(layout.layers, config, max_model_len)
    size = replace(size, draft_bytes=drafts.page_bytes(config))
    states = plan_states(config, layout.slot_bytes, page_bytes=size.page_bytes, available=available)
    if states is None and config.state_memory is not None:
        log.warning("%s: no layer is recurrent, so state_memory is not used", config.model)
    num_pages = part.smallest(_num_pages(config, size, max_model_len, states, available, part))
    if states is not None:
        states = replace(states, num_slots=part.smallest(states.num_slots))
    return _Room(size, states, num_pages)


def _state_pool(states: RecurrentState, result: ProbeResult) -> StatePool:
    zeros = mx.zeros if result.recurrent is None else result.recurrent.recurrences.zeros
    return StatePool(states.num_slots, result.entries, zeros=zeros)


def _as_written(
    config: EngineConfig, architecture: str, states: RecurrentState, written: int, size: Sizing
) -> RecurrentState:
    planned = replace(config, state_memory=states.nbytes)
    try:
        fitting = plan_states(planned, written, page_bytes=size.page_bytes, available=states.nbytes)
    except InvalidConfig:
        raise InvalidConfig(
            f"state_memory must hold the recurrent state of one sequence ({format_size(written)}) and a "
            f"snapshot of it, got {format_size(states.nbytes)}; raise state_memory"
        ) from None
    assert fitting is not None
    log.info(
        "%s: a slot of recurrent state takes %s instead of the expected %s, so there are %d slots",
        architecture,
        format_size(fitting.slot_bytes),
        format_size(states.slot_bytes),
        fitting.num_slots,
    )
    return replace(fitting, every_page=states.every_page)


def _num_pages(
    config: EngineConfig,
    size: Sizing,
    max_model_len: int,
    states: RecurrentState | None,
    available: int,
    part: WholeModel,
) -> int:
    taken = 0 if states is None else states.nbytes
    available -= taken
    shared = config.kv_memory is not None and config.state_memory is None
    if not sum(size.group_bytes):
        return config.num_pages or -(-max_model_len // config.page_size) * config.max_running
    num_pages = num_pages_for(
        size,
        kv_memory=max(config.kv_memory - taken, 0) if shared and config.kv_memory else config.kv_memory,
        num_pages=config.num_pages,
        max_running=config.max_running,
        max_model_len=max_model_len,
        available=available,
    )
    needed = size.own_bytes_for(num_pages) + part.num_machines * size.draft_bytes(num_pages)
    if needed > available:
        raise InvalidConfig(
            f"{num_pages} pages take {format_size(needed)}, but only {format_size(available)} are available; "
            "lower kv_memory or num_pages"
        )
    return num_pages


def _create_kv_cache(
    config: EngineConfig, choice: BackendSelection, layout: CacheLayout, size: Sizing, num_pages: int
) -> PagedKVCache:
    spec = PoolSpec(
        layers=layout.layers,
        num_pages=num_pages,
        page_size=config.page_size,
        k_format=config.page_formats.k,
        v_format=config.page_formats.v,
    )
    try:
        kv_cache = create_kv_cache(
            choice.backend,
            spec,
            size.groups,
            size.pages(num_pages),
            residual=size.residual,
            residual_format="fp16" if layout.dtype == mx.float16 else "bf16",
        )
    except ValueError as error:
        raise InvalidConfig(f"{choice.backend.name} backend: {error}") from error
    predicted = size.own_bytes_for(num_pages)
    taken = sum(storage.nbytes for storage in kv_cache.storages)
    assert taken == predicted, f"the pages take {taken} bytes instead of the predicted {predicted}"
    return kv_cache


def _gathered_row_bytes(layout: CacheLayout, size: Sizing) -> int:
    copies = 3 if size.residual else 1
    values = copies * max(spec.num_kv_heads * (spec.head_dim + spec.value_dim) for spec in layout.layers)
    return values * layout.dtype.size
