from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.kernels.cpus import available_threads
from octavo.kernels.interface import PageStorage
from octavo.kernels.page_bytes import PageBytes

from ...api.config import EngineConfig
from ...api.sampling_params import SamplingParams
from ...kv_store.page_runs import PageLayoutKey
from ..base import Adapters, HeadRunner, Images, Pending, Resolved, RunOutput, with_failed_rows
from ..batch import Batch
from ..load.load import load_paged_runner
from ..model_runner import PagedRunner
from ..sampling.sampler import SampleState
from .group import LeadingGroup, RankGroup, Shard
from .stages import Stage


def load_leading_runner(config: EngineConfig) -> LeadingRunner:
    if config.threads is None:
        config = replace(config, threads=max(1, available_threads() // config.tensor_parallel))
    group = LeadingGroup(config)
    try:
        part = _part(config, group)
        return LeadingRunner(load_paged_runner(config, part=part), group, part)
    except BaseException:
        group.close()
        raise


def _part(config: EngineConfig, group: RankGroup) -> Shard:
    return Stage(group) if config.pipeline_parallel > 1 else Shard(group)


class LeadingRunner:
    head: HeadRunner | None = None
    adapters: Adapters | None = None
    images: Images | None = None

    def __init__(self, inner: PagedRunner, group: LeadingGroup, part: Shard) -> None:
        self._inner, self._group, self._part = inner, group, part
        self.info = replace(inner.info, other_ranks=tuple(each.recv() for each in group.steps))

    def submit(self, batch: Batch, states: Sequence[SampleState], after: Pending | None = None) -> Pending:
        assert after is None, "steps of ranks do not overlap"
        return Resolved(self.run(batch, states))

    def run(self, batch: Batch, states: Sequence[SampleState]) -> RunOutput:
        step = batch._replace(inputs=dict(batch.inputs))
        for connection in self._group.steps:
            connection.send(step)
        output = self._inner.run(self._part.receive(batch), states)
        failed = set(output.failed_rows)
        for connection in self._group.steps:
            failed.update(connection.recv())  # K or V may be NaN on one rank only
        return with_failed_rows(batch, output._replace(failed_rows=tuple(sorted(failed))))

    @property
    def page_layout_key(self) -> PageLayoutKey:
        return self._inner.page_layout_key

    @property
    def storages(self) -> tuple[PageStorage, ...]:
        return self._inner.storages

    def read_pages(self, pages: Sequence[int], group: int) -> PageBytes:
        raise AssertionError(f"pages {pages} of group {group} lie in several processes")

    def write_pages(self, pages: Sequence[int], data: PageBytes, group: int) -> None:
        raise AssertionError(f"pages {pages} of group {group}, {data!r:.20}, lie in several processes")

    def close(self) -> None:
        self._group.close()
        self._inner.close()


def follow(config: EngineConfig, group: RankGroup) -> None:
    """Compute this rank's part of every step until rank 0 ends."""
    part = _part(config, group)
    runner = load_paged_runner(config, part=part)
    greedy = SampleState(
        SamplingParams(temperature=0.0), seed=0, prompt_ids=[], vocab_size=runner.info.vocab_size
    )
    (leader,) = group.steps
    leader.send(runner.info.memory)
    while True:
        try:
            batch = leader.recv()
        except EOFError:
            return
        leader.send(part.follow(runner, batch, greedy))
