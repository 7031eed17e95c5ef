from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast, get_args

from octavo.block_manager import BlockManager
from octavo.scheduler import Limits, Scheduler
from octavo.scheduler.waiting import DEFAULT_QUANTUM, PROMPT_COST, WaitingQueue

from ..api.config import AUTO, EngineConfig
from ..api.engine_info import EngineInfo
from ..api.errors import InvalidConfig
from ..api.outputs import TokenLogprob
from ..api.sampling_params import MAX_LOGPROBS, SamplingParams, Speculate
from ..api.stats import Observer
from ..executor.base import ModelRunner
from ..executor.draft_config import draft_config
from ..executor.load import load_runner, model_folder
from ..executor.parallel import load_ranks
from ..kv_store.folder import ShardFolder
from ..kv_store.host_memory import HostMemory
from ..kv_store.page_store import PageStore
from ..kv_store.remote import RemoteShards
from ..kv_store.shard_store import ShardStore
from ..kv_store.transfer import PageTransfer
from ..speculation.draft_model import DraftModel
from ..speculation.draft_tables import BatchDrafter
from ..speculation.drafting import Speculation
from ..speculation.mtp_drafts import MTPDrafts
from ..tokenizer.chat_template import read_chat_template
from ..tokenizer.tokenizer import Tokenizer, check_parsers, load_tokenizer
from .adapter_part import AdapterPart
from .draft_part import DraftPart
from .engine_core import EngineCore
from .gauge_source import GaugeSource
from .image_part import ImagePart
from .request import Request
from .step_stats import StepStats

CACHE_DIR_BYTES = 10 * 1024**3  # default limit of the cache folder


def build_core(
    config: EngineConfig,
    observer: Observer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """Build the core with its model and tokenizer. Raises ModelLoadError or InvalidConfig."""
    if config.chat_template is not None:
        read_chat_template(config.chat_template)
    check_parsers(config.reasoning_parser, config.tool_call_parser)

    @functools.cache
    def tokenizer_of_model() -> Tokenizer:
        return load_tokenizer(
            model_folder(config),
            config.chat_template,
            reasoning_parser=config.reasoning_parser,
            tool_call_parser=config.tool_call_parser,
        )

    def score(trial: ModelRunner, of_trial: EngineConfig) -> list[TokenLogprob]:
        info, tokenizer = trial.info, tokenizer_of_model()
        ids = text_ids(tokenizer, vocab_size=info.vocab_size, max_model_len=info.max_model_len)
        return score_tokens(assemble(of_trial, trial, tokenizer), tokenizer, ids)

    load = load_ranks if config.num_ranks > 1 else load_runner
    runner = load(config, score=score)
    if config.kv_format == AUTO:
        config = config.with_format(runner.info.kv_format)
    drafts: BatchDrafter | None = None
    try:
        tokenizer = tokenizer_of_model()
        if config.draft_model is not None:
            drafts = load_draft_model(config, runner, tokenizer)
        elif (head := runner.head) is not None:
            blocks = BlockManager(head.num_pages, head.page_size, prefix_cache=False)
            drafts = MTPDrafts(head, blocks, max_tokens=config.max_step_tokens)
        return assemble(config, runner, tokenizer, observer, drafts, clock)
    except BaseException:
        if drafts is not None:
            drafts.shut_down()
        runner.close()
        raise


def load_draft_model(config: EngineConfig, runner: ModelRunner, tokenizer: Tokenizer) -> DraftModel:
    """Load the draft model. Raises InvalidConfig if it does not match the target model."""
    assert config.draft_model is not None
    threads = config.threads if config.num_ranks == 1 else runner.info.threads
    own = draft_config(replace(config, threads=threads), num_pages=runner.info.num_pages)
    drafter = load_runner(own, is_draft=True)
    try:
        difference = tokenizer.difference(load_tokenizer(drafter.info.path))
        if difference is not None:
            raise InvalidConfig(
                f"draft model {config.draft_model} must have the vocabulary of {config.model}: {difference}; "
                "choose a draft model with the same tokenizer"
            )
        states = drafter.info.states
        if states is not None:
            states = replace(states, num_drafted=states.num_slots - 1)
        blocks = BlockManager(
            drafter.info.groups or drafter.info.num_pages,
            drafter.info.page_size,
            prefix_cache=config.prefix_cache and states is None,
            max_chunk=config.max_step_tokens,
            states=states,
        )
        return DraftModel(
            drafter, blocks, max_tokens=config.max_step_tokens, vocab_size=runner.info.vocab_size
        )
    except BaseException:
        drafter.close()
        raise


def assemble(
    config: EngineConfig,
    runner: ModelRunner,
    tokenizer: Tokenizer,
    observer: Observer | None = None,
    draft_model: BatchDrafter | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    info = runner.info
    try:
        blocks = BlockManager(
            info.groups or info.num_pages,
            info.page_size,
            prefix_cache=config.prefix_cache,
            max_pinned=config.max_pinned_pages,
            max_chunk=config.max_step_tokens,
            states=info.states,
        )
    except ValueError as error:
        raise InvalidConfig(str(error)) from error
    limits = Limits(
        max_step_tokens=config.max_step_tokens,
        max_running=config.max_running,
        target_itl=_target_itl(config),
        row_tile=info.row_tile,
    )
    if config.save_dir is not None:
        _make_folder("save_dir", config.save_dir)
    transfer = PageTransfer(runner, blocks, remember=config.save_dir is not None)
    if config.cache_dir is not None or config.save_dir is not None or config.remote_cache is not None:
        _ = runner.page_layout_key
    host = None
    if config.swap_memory:
        host = HostMemory(runner, blocks, max_bytes=config.swap_memory, clock=clock)
    shards = _shard_store(config, runner, blocks)
    store = PageStore(blocks, transfer, host=host, shards=shards, clock=clock)
    stats = StepStats(observer)
    adapters = None if runner.adapters is None else AdapterPart(runner.adapters, config.max_loras)
    images = None
    if runner.images is not None:
        images = ImagePart(
            runner.images, blocks, stats=stats, max_step_tokens=config.max_step_tokens, clock=clock
        )
    parts = tuple(part for part in (adapters, images) if part is not None)
    scheduler = Scheduler(blocks, limits, store, waiting=waiting_queue(config, blocks), resources=parts)
    drafts_from = "draft" if draft_model is not None else drafts_by(config, info)
    speculation = Speculation(drafts_from)
    return EngineCore(
        runner,
        tokenizer,
        blocks,
        scheduler,
        transfer=transfer,
        drafts=DraftPart(speculation, draft_model, scheduler, clock),
        gauge_source=GaugeSource(
            blocks,
            scheduler,
            store=store,
            adapter_load=adapters.usage if adapters is not None else None,
            media_waits=images.num_waiting if images is not None else lambda: 0,
            clock=clock,
        ),
        stats=stats,
        parts=parts,
        shards=shards,
        overlaps=config.async_steps is not False,
        clock=clock,
    )


def drafts_by(config: EngineConfig, info: EngineInfo) -> Speculate:
    if config.speculate == "auto":
        # Drafts are on by default only if they cost almost nothing and change no result.
        return "ngram" if info.batch_invariant and info.states is None else "off"
    return cast("Speculate", config.speculate) if config.speculate in get_args(Speculate) else "off"


def waiting_queue(config: EngineConfig, blocks: BlockManager) -> WaitingQueue:
    policy, weights = config.schedule_policy, config.tenant_weight_by_name
    return WaitingQueue(
        blocks if policy in {"lpm", "dlpm"} else None,
        weights if policy in {"vtc", "dlpm"} else None,
        quantum=DEFAULT_QUANTUM if policy == "dlpm" else config.max_step_tokens * PROMPT_COST,
    )


def _target_itl(config: EngineConfig) -> float | Literal["auto"] | None:
    if config.target_itl == "off":
        return None
    return "auto" if config.target_itl == "auto" else config.target_itl / 1e3


def _shard_store(config: EngineConfig, runner: ModelRunner, blocks: BlockManager) -> ShardStore | None:
    if config.remote_cache is not None:
        return ShardStore(RemoteShards(config.remote_cache, runner.page_layout_key), runner, blocks)
    if config.cache_dir is None:
        return None
    try:
        max_bytes = config.cache_dir_bytes or CACHE_DIR_BYTES
        folder = ShardFolder(config.cache_dir, runner.page_layout_key, max_bytes=max_bytes)
    except OSError as error:
        raise _unusable("cache_dir", config.cache_dir, error) from error
    return ShardStore(folder, runner, blocks)


def _make_folder(name: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unusable(name, folder, error) from error


def _unusable(name: str, folder: Path, error: OSError) -> InvalidConfig:
    return InvalidConfig(
        f"{name} {folder} cannot be used: {error.strerror or error}; give a folder that this process may "
        "write, or leave it out"
    )


TEXT = """The harbour was quiet when Ines opened the boat house. Her brother Tomas had left a note on the table:
"The red key is under the third stone, the blue key is in the tea tin." She read it twice, put on her coat and went
down to the water. Three boats lay at the pier. The first was called Marigold, the second Old Peter, and the third had
no name at all. Ines had promised to bring Marigold back to the village before noon, but the engine needed the red key,
and the rain had covered the stones with leaves. She counted them slowly: one, two, three. Under the third stone lay
the red key, wet and cold. "Thank you, Tomas," she said, and laughed. At eleven o'clock Marigold left the pier, passed
Old Peter and the boat without a name, and sailed out of the harbour. In the village Tomas was waiting. "Did you find
the red key?" he asked. "Under the third stone," said Ines, "as you wrote. And the blue key is still in the tea tin."
"""  # noqa: E501 - one paragraph


def text_ids(tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int) -> list[int]:
    ids = [token for token in tokenizer.encode(TEXT.replace("\n", " ")) if token < vocab_size]
    return ids[: max_model_len - 1]


def score_tokens(core: EngineCore, tokenizer: Tokenizer, token_ids: list[int]) -> list[TokenLogprob]:
    params = SamplingParams(max_tokens=1, prompt_logprobs=MAX_LOGPROBS, ignore_eos=True)
    request = Request(
        "text", token_ids, params, max_tokens=1, tokenizer=tokenizer, vocab_size=core.info.vocab_size,
        arrived_at=0.0,
    )  # fmt: skip
    core.add(request)
    found: list[TokenLogprob] = []
    while core.has_work:
        for update in core.step():
            if update.delta.prompt_logprobs is not None:
                found += update.delta.prompt_logprobs.rest
    return found
