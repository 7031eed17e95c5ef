from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from fakes import FakeCore, small_config
from killable import FOUR_TOKENS, GROUPS, kill_one, nursery, prompt_of
from octavo.block_manager import Digest, KVGroupSpec
from octavo.engine import LLM
from octavo.engine.kv_store import folder as folder_module
from octavo.engine.kv_store.folder import ShardFolder
from octavo.engine.kv_store.page_files import read_run
from oracle import alone
from page_shards import bytes_of, make_kind

HOW_OFTEN = pytest.mark.parametrize("kills", [6, pytest.param(40, marks=pytest.mark.slow)])


@HOW_OFTEN
def test_killed_at_random_moments(kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, kind = random.Random(kills), make_kind()
    announced: set[str] = set()
    with nursery("shards", tmp_path) as process:
        for number in range(kills):
            first = rng.randrange(number + 1) * 2
            announced |= kill_one(process, first, rng, most_s=0.004)
            found = {path.stem: path for path in tmp_path.rglob("*.safetensors")}
            assert announced <= found.keys(), "what was there is there"
            for name, path in found.items():
                run = read_run(path)  # raises if the file is not whole
                np.testing.assert_array_equal(
                    run.parts[0].pages[0], bytes_of(Digest(bytes.fromhex(name)), kind)
                )
    assert len(announced) > kills
    unfinished = [path for path in tmp_path.rglob(".*") if path.is_file()]
    assert len(unfinished) <= kills
    monkeypatch.setattr(folder_module, "STALE_S", -1.0)
    ShardFolder(tmp_path, kind, max_bytes=1 << 30).prune()
    assert {path.stem for path in tmp_path.rglob("*") if path.is_file()} == found.keys()


def restart(folder: Path, groups: tuple[KVGroupSpec, ...], numbers: list[int]) -> int:
    prompts = [prompt_of(number) for number in numbers]
    fake = FakeCore(groups=groups)
    with LLM(small_config(cache_dir=folder), core_factory=fake) as llm:
        outputs = llm.generate(prompts, FOUR_TOKENS, progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == alone(prompt, FOUR_TOKENS).token_ids
    assert fake.core is not None
    fake.core._blocks.check()
    counts = fake.core._gauge_source.measure().store
    assert counts is not None
    assert not counts.dropped, "nothing that is not whole has its name"
    return counts.loaded * fake.core._blocks.page_size


@HOW_OFTEN
@pytest.mark.parametrize("groups", GROUPS)
def test_engines_killed_at_random_moments(groups: str, kills: int, tmp_path: Path) -> None:
    rng, loaded, known = random.Random(kills), 0, set[Path]()
    with nursery(groups, tmp_path) as process:
        for number in range(kills):
            served = kill_one(process, 3 * number, rng, most_s=0.02)
            found = set(tmp_path.rglob("*.safetensors"))
            assert known <= found
            for path in found - known:
                read_run(path)  # raises if the file is not whole
            last = 3 * number + len(served)
            loaded += restart(tmp_path, GROUPS[groups], [last, 3 * number, last + 1])
            known = found
    assert loaded > 4 * kills
