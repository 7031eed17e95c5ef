from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.kernels.cpus import available_threads
from octavo.kernels.interface import PageStorage, PoolSpec
from octavo.kernels.page_bytes import PageBytes

from ...api.config import EngineConfig
from ...api.engine_info import AdapterInfo
from ...api.errors import InvalidConfig, InvalidRequest, OctavoError
from ...kv_store.page_runs import PageLayoutKey, StateKind
from ...memory.weight_files import weight_files
from ..adapters.slots import AdapterSlots, load_modules
from ..base import Adapters, HeadRunner, Images, Pending, Resolved, RunOutput, with_failed_rows
from ..batch import Batch
from ..load.load import load_paged_runner
from ..load.page_loss import Scores, ScoreText
from ..model_runner import PagedRunner
from ..sampling.sampler import SampleState
from .group import FollowingGroup, LeadingGroup, RankGroup
from .shards import Shard
from .stages import Stage


def load_leading_runner(config: EngineConfig, score: ScoreText) -> LeadingRunner:
    group = LeadingGroup(config)
    part = _part_of(config, group)

    def score_by_all(trial: Any, of_trial: EngineConfig) -> Scores:
        try:
            scores = score(LeadingRunner(trial, part, group), of_trial)
        except InvalidConfig as error:
            group.tell(error)
            raise
        group.tell(scores)
        return scores

    try:
        has_drafter = config.draft_model is not None or config.speculate == "mtp"
        group.tell(replace(config, speculate="ngram") if has_drafter else config)  # plans as many state slots
        inner = _load(config, group, part, score_by_all)
        memories, shapes = _checked_others(inner, group)
        runner = LeadingRunner(inner, part, group, f"{config.ranks_setting}={config.num_ranks}", shapes)
        runner.info = replace(inner.info, other_ranks=memories)
        if runner.adapters is not None:
            load_modules(config, runner.adapters)
            runner.info = replace(runner.info, adapters=runner.adapters.infos())
        return runner
    except BaseException:
        group.close(has_failed=True)
        raise


def _part_of(config: EngineConfig, group: RankGroup) -> Shard:
    if config.pipeline_parallel > 1:
        return Stage(group, embeds=config.speculate == "mtp")
    return Shard(group)


def _load(config: EngineConfig, group: RankGroup, part: Shard, score: ScoreText | None) -> PagedRunner:
    if config.threads is None and config.tensor_parallel > 1:
        config = replace(config, threads=max(1, available_threads() // group.num_here))
    return load_paged_runner(config, score=score, part=part)


def _files_of(runner: PagedRunner) -> str:
    path = runner.info.path
    sizes = [(file.name, file.stat().st_size) for file in weight_files(path)]
    return hashlib.sha256((path / "config.json").read_bytes() + repr(sizes).encode()).hexdigest()


def _checked_others(own: PagedRunner, group: LeadingGroup) -> tuple[Any, Any]:
    memories, shapes, files = zip(*group.answers(), strict=True)
    if len({_files_of(own), *files}) > 1:
        raise InvalidConfig(
            f"model must have the same config.json and weight files on all ranks, got others for "
            f"{own.info.path}; copy the model to each machine"
        )
    return memories, shapes


class Call(NamedTuple):
    method: str
    arguments: tuple[Any, ...]


class RankAdapters:
    def __init__(self, own: AdapterSlots, group: LeadingGroup) -> None:
        self._own, self._group = own, group
        self.info, self.infos, self.slot = own.info, own.infos, own.slot

    def load(self, name: str, folder: Path, *, replace: bool = False) -> AdapterInfo:
        """Load an adapter on all ranks, or on none. Raises InvalidRequest, also for other ranks."""
        info = self._own.prepare(name, folder, replace)
        try:
            for rank, other in enumerate(self._call("prepare", name, folder, replace), 1):
                if other.digest != info.digest:
                    raise InvalidRequest(
                        f"adapters must have the same files on all ranks, got others on rank {rank} for "
                        f"{folder}; copy the folder to each machine"
                    )
        except OctavoError:
            self._own.discard()
            self._call("discard")
            raise
        squares = zip(self._own.squares(), *self._call("squares"), strict=True)
        totals = [np.sum(parts, axis=0) for parts in squares]
        self._own.commit(totals)
        self._call("commit", totals)
        return info

    def unload(self, name: str) -> None:
        self._own.unload(name)
        self._call("unload", name)

    def hold(self, name: str) -> bool:
        if not self._own.hold(name):
            return False
        assert all(self._call("hold", name)), "ranks give out slots in the same order"
        return True

    def release(self, name: str) -> None:
        self._own.release(name)
        self._call("release", name)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        self._group.tell(Call(f"adapters.{method}", arguments))
        return self._group.answers()


class LeadingRunner:
    def __init__(
        self,
        inner: PagedRunner,
        part: Shard,
        group: LeadingGroup,
        name: str = "",
        shapes: tuple[PageLayoutKey, ...] = (),
    ) -> None:
        self._inner, self._group, self._part, self._name = inner, group, part, name
        self._shapes = (inner.page_shape, *shapes)
        self.info = inner.info
        self.head: HeadRunner | None = inner.head
        self.images: Images | None = inner.images
        self.adapters: Adapters | None = None
        if inner.adapters is not None:
            self.adapters = RankAdapters(inner.adapters, group)

    def submit(self, batch: Batch, states: Sequence[SampleState], after: Pending | None = None) -> Pending:
        assert after is None, "steps of ranks do not overlap"
        return Resolved(self.run(batch, states))

    def run(self, batch: Batch, states: Sequence[SampleState]) -> RunOutput:
        self._group.tell(batch._replace(inputs=dict(batch.inputs)))
        output = self._inner.run(self._part.receive(batch), states)
        failed = set(output.failed_rows).union(*self._group.answers())  # K or V may be NaN on one rank only
        return with_failed_rows(batch, output._replace(failed_rows=tuple(sorted(failed))))

    @functools.cached_property
    def page_layout_key(self) -> PageLayoutKey:
        """Page-layout key of all ranks together. A page has the bytes of each rank, rank 0 first."""
        own = self._inner.page_layout_key
        context = f"{self._name} {own.context}"
        return replace(own, specs=self._specs(), context=context, states=self._states())

    def _specs(self) -> tuple[PoolSpec, ...]:
        groups = zip(*(shape.specs for shape in self._shapes), strict=True)
        return tuple(
            replace(
                next((spec for spec in ranks if spec.layers), ranks[0]),
                layers=tuple(layer for spec in ranks for layer in spec.layers),
            )
            for ranks in groups
        )

    def _states(self) -> tuple[StateKind, ...]:
        kinds = [kind for shape in self._shapes for kind in shape.states]
        entries = tuple(entry for kind in kinds for entry in kind.entries)
        nbytes = sum(kind.nbytes for kind in kinds)
        return tuple(replace(kind, entries=entries, nbytes=nbytes) for kind in kinds[:1])

    @property
    def storages(self) -> tuple[PageStorage, ...]:
        return self._inner.storages

    def read_pages(self, pages: Sequence[int], group: int) -> PageBytes:
        self._group.tell(Call("read_pages", (pages, group)))
        return np.concatenate([self._inner.read_pages(pages, group), *self._group.answers()], axis=1)

    def write_pages(self, pages: Sequence[int], data: PageBytes, group: int) -> None:
        widths = [sum(shape.part_bytes[group : group + 1]) for shape in self._shapes]
        own, *others = map(np.ascontiguousarray, np.split(data, np.cumsum(widths)[:-1], axis=1))
        for connection, part in zip(self._group.steps, others, strict=True):
            connection.send(Call("write_pages", (pages, part, group)))
        self._inner.write_pages(pages, own, group)
        self._group.answers()

    def close(self) -> None:
        self._group.close()
        self._inner.close()


def follow() -> None:
    """Compute this rank's part of every step until rank 0 ends."""
    group = FollowingGroup()
    (leader,) = group.steps
    try:
        config = leader.recv()
        part = _part_of(config, group)
        runner = _load(config, group, part, lambda trial, _: _follow_steps(trial, part, leader))
        leader.send((runner.info.memory, runner.page_shape, _files_of(runner)))
        _follow_steps(runner, part, leader)
    except (EOFError, ConnectionError):
        group.leave()


def _follow_steps(runner: Any, part: Shard, leader: Connection[Any, Any]) -> Any:
    while isinstance(told := leader.recv(), Batch | Call):
        leader.send(_answer(runner, told) if isinstance(told, Call) else part.follow(runner, told))
    if isinstance(told, InvalidConfig):
        raise told
    return told


def _answer(runner: PagedRunner, call: Call) -> Any:
    try:
        return operator.attrgetter(call.method)(runner)(*call.arguments)
    except OctavoError as error:
        return error
