"""Putting an engine together from its configuration."""

from __future__ import annotations

from typing import Literal

from octavo.block_manager import BlockManager
from octavo.scheduler import Limits, Scheduler
from octavo.scheduler.waiting import (
    Costs,
    DeficitQueue,
    FairQueue,
    FirstComeQueue,
    LongestPrefixQueue,
    WaitingQueue,
)

from ..api.config import EngineConfig
from ..api.errors import InvalidConfig
from ..api.stats import Observer
from ..executor.base import ModelRunner, load_runner
from ..kv_store.disk_tier import DiskTier
from ..kv_store.transfer import PageTransfer
from ..tokenizer.chat_template import read_chat_template
from ..tokenizer.tokenizer import Tokenizer, load_tokenizer
from .engine_core import EngineCore


def build_core(config: EngineConfig, observer: Observer | None = None) -> EngineCore:
    """Load the model and its tokenizer; call it on the thread that will run the steps.

    Raises ModelLoadError or InvalidConfig with one clear line.
    """
    if config.chat_template is not None:
        read_chat_template(config.chat_template)  # refused before anything slow
    runner = load_runner(config)
    try:
        return assemble(config, runner, load_tokenizer(runner.info.path, config.chat_template), observer)
    except BaseException:
        runner.close()
        raise


def assemble(
    config: EngineConfig, runner: ModelRunner, tokenizer: Tokenizer, observer: Observer | None = None
) -> EngineCore:
    """An engine around a runner that is ready."""
    info = runner.info
    try:
        blocks = BlockManager(
            info.groups or info.num_pages,
            info.page_size,
            prefix_cache=config.prefix_cache,
            policy=config.cache_policy,
            max_pinned=config.max_pinned_pages,
            max_chunk=config.max_step_tokens,
            quantize_after=config.quantize_after,
            states=info.states,
        )
    except ValueError as error:  # pins that leave no room in a pool of this size
        raise InvalidConfig(str(error)) from error
    if info.states is not None and config.speculate != "off":
        raise InvalidConfig(
            f"speculate={config.speculate!r} needs states that can be rolled back, and those of "
            f"{info.architecture}'s recurrent layers cannot; leave it out for this model"
        )
    limits = Limits(
        max_step_tokens=config.max_step_tokens,
        max_running=config.max_running,
        target_itl=_target_itl(config),
    )
    transfer = PageTransfer(runner, blocks, remember=config.save_dir is not None)
    if config.cache_dir is not None or config.save_dir is not None:
        _ = runner.page_kind  # hashes the weights: now, and not between two steps
    disk = _disk_tier(config, runner, blocks, transfer)
    return EngineCore(
        runner,
        tokenizer,
        blocks,
        Scheduler(blocks, limits, disk, waiting=waiting_queue(config, blocks)),
        transfer=transfer,
        store_counts=disk.counts if disk is not None else None,
        observer=observer,
        speculate=config.speculate,
        draft_tokens=config.draft_tokens,
        overlaps=config.async_steps == "on" or (config.async_steps == "auto" and info.backend == "metal"),
    )


def waiting_queue(config: EngineConfig, blocks: BlockManager) -> WaitingQueue:
    """Who is let in next, as configured."""
    prompt, output = config.cost_per_token
    costs = Costs(prompt, output, config.tenant_weight_by_name)
    if config.fairness == "vtc":
        return FairQueue(costs, head_start=config.max_step_tokens * prompt)
    if config.fairness == "dlpm":
        return DeficitQueue(blocks, costs, quantum=config.fairness_quantum)
    return LongestPrefixQueue(blocks) if config.schedule_policy == "lpm" else FirstComeQueue()


def _target_itl(config: EngineConfig) -> float | Literal["auto"] | None:
    """In seconds; None for none."""
    if config.target_itl == "off":
        return None
    return "auto" if config.target_itl == "auto" else config.target_itl / 1e3


def _disk_tier(
    config: EngineConfig, runner: ModelRunner, blocks: BlockManager, transfer: PageTransfer
) -> DiskTier | None:
    if config.cache_dir is None:
        return None
    try:
        return DiskTier(config.cache_dir, runner, blocks, transfer, max_bytes=config.cache_dir_bytes)
    except OSError as error:
        raise InvalidConfig(
            f"cache_dir {config.cache_dir} cannot be used: {error.strerror or error}; give a folder that "
            "this process may write, or leave it out"
        ) from error
