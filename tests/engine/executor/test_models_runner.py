from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import tiny_models
from octavo.block_manager import PageCopy, PageId
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.executor import model_runner as paged
from octavo.engine.executor.batch import Batch
from octavo.engine.executor.forward_outputs import Outputs
from octavo.engine.executor.parallel.shards import Shard
from tiny_runners import PROMPT, load, logprobs_of, make_batch, state, tokens_of

pytestmark = pytest.mark.parity


@pytest.fixture
def runner(folder: Path, backend: str) -> Iterator[paged.PagedRunner]:
    loaded = load(folder, backend)
    yield loaded
    loaded.close()


def test_a_row_sampled_twice_and_rows_in_any_order(runner: paged.PagedRunner) -> None:
    batch = make_batch([(PROMPT, 0, [3, 9]), (PROMPT[:4], 0, [5])], [14, 10, 10])
    output = runner.run(batch, [state(), state(), state()])
    alone = [
        runner.run(make_batch([(PROMPT[:4], 0, [1])], [3]), [state()]),
        runner.run(make_batch([(PROMPT, 0, [1, 2])], [10]), [state()]),
    ]
    assert tokens_of(output) == [*tokens_of(alone[0]), *tokens_of(alone[1]) * 2]
    assert output.failed_rows == ()


def test_a_step_without_samples_writes_its_pages(runner: paged.PagedRunner) -> None:
    whole = runner.run(make_batch([(PROMPT, 0, [1, 2])], [10]), [state()])
    assert runner.run(make_batch([(PROMPT[:6], 0, [4, 5])], []), []).samples == ()
    chunked = runner.run(make_batch([(PROMPT[6:], 6, [4, 5])], [4]), [state()])
    assert tokens_of(chunked) == tokens_of(whole)
    assert logprobs_of(chunked) == pytest.approx(logprobs_of(whole), abs=0.1)


def test_a_follower_computes_the_rows_but_not_their_logits(
    runner: paged.PagedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[list[mx.array]] = []
    forward = runner._model.forward

    def noted(*args: Any) -> Outputs:
        computed.append((outputs := forward(*args)).arrays)
        return outputs

    monkeypatch.setattr(runner._model, "forward", noted)
    rank = Shard(SimpleNamespace(rank=1))  # type: ignore[arg-type]
    for tokens, written, row in ((PROMPT[:6], 0, 5), (PROMPT[6:], 6, 4), (PROMPT[6:], 6, 4)):
        batch = make_batch([(tokens, written, [4, 5])], [row])._replace(hidden=np.array([row], np.int32))
        assert rank.follow(runner, batch) == ()
    rows, hidden = computed[-1]
    assert rows.shape == hidden.shape == (1, 64)
    assert mx.array_equal(rows.astype(mx.float32), hidden)
    sampled = runner.run(make_batch([([PROMPT[-1]], 10, [4, 5])], [0]), [state()])
    wanted = runner.run(make_batch([(PROMPT, 0, [1, 2])], [10]), [state()])
    assert tokens_of(sampled) == tokens_of(wanted)


def test_pages_are_copied_before_the_step_writes(runner: paged.PagedRunner) -> None:
    runner.run(make_batch([(PROMPT, 0, [1, 2])], []), [])
    wanted = runner.run(make_batch([([9], 11, [1, 2])], [0]), [state()])
    runner.run(make_batch([([200], 11, [1, 2])], []), [])
    copies = (PageCopy(PageId(2), PageId(7)),)
    got = runner.run(make_batch([([9], 11, [1, 7])], [0], copies), [state()])
    assert tokens_of(got) == tokens_of(wanted)
    assert logprobs_of(got) == logprobs_of(wanted)
    kept = runner.run(make_batch([([4], 12, [1, 2])], [0]), [state()])
    other = runner.run(make_batch([([4], 12, [1, 7])], [0]), [state()])
    assert logprobs_of(kept) != logprobs_of(other), "the copy must not be the original"


def test_samples_do_not_depend_on_neighbours(runner: paged.PagedRunner) -> None:
    params = SamplingParams(temperature=1.0, seed=1, logprobs=0)
    alone = runner.run(make_batch([(PROMPT, 0, [1, 2])], [10]), [state(params, 5)])
    work = [(PROMPT[:7], 0, [3]), (PROMPT, 0, [4, 6]), ([8], 0, [5])]
    together = runner.run(make_batch(work, [6, 17, 18]), [state(params, 1), state(params, 5), state()])
    assert together.samples[1].token == alone.samples[0].token


def test_logits_that_are_not_finite_fail_their_row_only(
    runner: paged.PagedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = runner._model.forward

    def spoilt(*args: Any) -> Outputs:
        outputs = forward(*args)
        logits = outputs.logits
        assert logits is not None
        nan = mx.array(float("nan"), logits.dtype)
        return outputs._replace(logits=mx.where(mx.arange(len(logits))[:, None] == 1, nan, logits))

    monkeypatch.setattr(runner._model, "forward", spoilt)
    work = [(PROMPT[:3], 0, [1]), (PROMPT[:4], 0, [2]), (PROMPT[:2], 0, [3])]
    output = runner.run(make_batch(work, [2, 6, 8]), [state(), state(), state()])
    first, bad, last = output.samples
    assert first.token is not None
    assert last.token is not None
    assert bad.token is None
    assert bad.error is not None
    assert "not finite" in bad.error
    assert output.failed_rows == ()


@pytest.mark.parametrize("rows", [None, 1], ids=["at once", "in slices"])
def test_keys_that_are_not_finite_fail_their_sequence_only(
    tmp_path: Path, backend: str, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 13 has an infinite embedding, so K of rows that read it cannot be stored."""
    if rows is not None:
        monkeypatch.setattr(paged.PagedRunner, "_rows_at_once", lambda *_: rows)
    folder = tiny_models.make_model(tmp_path, "llama", dtype=mx.float32)
    runner = load(folder, backend)
    model = runner._model._model.model
    weight = np.array(model.embed_tokens.weight)
    weight[13] = np.inf
    model.embed_tokens.weight = mx.array(weight)
    work = [(PROMPT[:3], 0, [1]), ([13, 6], 0, [2]), ([5, 13, 4], 0, [3]), ([8], 0, [4])]
    output = runner.run(make_batch(work, [2, 4, 8]), [state(), state(), state()])
    good, bad, last = output.samples
    assert good.token is not None
    assert last.token is not None
    assert bad.token is None
    assert bad.error is not None
    assert "keys, values" in bad.error
    failed = set(output.failed_rows)
    assert {3, 6} <= failed, "the sequence that samples nothing must be told of, too"
    assert not failed & {0, 1, 2}
    assert set(runner.run(make_batch(work, [2, 4, 8]), None).failed_rows) == failed
    again = runner.run(make_batch([(PROMPT[:3], 0, [1])], [2]), [state()])
    assert tokens_of(again) == [good.token]
    runner.close()


def test_keys_that_are_not_finite_are_found_in_steps_that_repeat(tmp_path: Path, backend: str) -> None:
    runner = load(tiny_models.make_model(tmp_path, "llama", dtype=mx.float32), backend)
    embedding = runner._model._model.model.embed_tokens
    embedding.weight = mx.where(mx.arange(tiny_models.VOCAB_SIZE)[:, None] == 13, mx.inf, embedding.weight)
    runner.run(make_batch([(PROMPT[:3], 0, [1]), (PROMPT[:3], 0, [2])], []), [])
    for position, tokens, failed in ((3, [5, 6], ()), (4, [7, 8], ()), (5, [9, 13], (1,)), (6, [4, 4], ())):
        work = [([token], position, [page]) for token, page in zip(tokens, (1, 2), strict=True)]
        assert runner.run(make_batch(work, [0, 1]), [state(), state()]).failed_rows == failed
    runner.close()


@pytest.mark.parametrize("token", [-1, tiny_models.VOCAB_SIZE])
def test_token_ids_outside_the_vocabulary_never_reach_the_embedding(
    runner: paged.PagedRunner, token: int
) -> None:
    with pytest.raises(ValueError, match=r"token ids must lie in \[0, 320\)"):
        runner.run(make_batch([([3, token], 0, [1])], [1]), [state()])


def test_pages_outside_the_pool_never_reach_a_kernel(runner: paged.PagedRunner) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        runner.run(make_batch([(PROMPT, 0, [1, 40])], [10]), [state()])


def test_index_keys_gathered_in_slices_choose_as_all_at_once(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(tiny_models.make_model(tmp_path, "deepseek_v32", dtype=mx.float32), backend)
    work = [([9], 11, [1, 2]), (PROMPT, 0, [3, 4]), (PROMPT[:5], 0, [5])]
    runner.run(make_batch([(PROMPT, 0, [1, 2])], []), [])
    once = runner.run(make_batch(work, [0, 5, 11, 16]), [state() for _ in range(4)])
    calls: list[int] = []
    compute = runner._model.forward

    def counted(batch: Batch, *rest: Any) -> Outputs:
        calls.append(len(batch.token_ids))
        return compute(batch, *rest)

    monkeypatch.setattr(runner._model, "forward", counted)
    monkeypatch.setattr(paged, "GATHER_BYTES", 4 * 12 * runner._gathered_row_bytes)  # type: ignore[operator]
    sliced = runner.run(make_batch(work, [0, 5, 11, 16]), [state() for _ in range(4)])
    assert calls == [4, 4, 4, 4, 1]
    assert tokens_of(sliced) == tokens_of(once)
    assert logprobs_of(sliced) == pytest.approx(logprobs_of(once), abs=1e-3)
    runner.close()


def test_the_limit_of_open_files_survives_mlx_lm() -> None:
    """Importing mlx-lm lowers the limit of the process, so a new process is measured."""
    import subprocess
    import sys

    code = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "import octavo.engine.executor.load.load\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == before, before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
