from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from octavo.block_manager import Digest
from octavo.engine.kv_store.folder import STALE_S, ShardFolder
from octavo.engine.kv_store.page_files import BadPages, read_run, write_run
from octavo.engine.kv_store.page_runs import PageLayoutKey, PagePart, PageRun
from octavo.kernels import FORMAT_NAMES
from octavo.kernels.interface import LayerSpec, PoolSpec
from page_shards import chain_of, make_kind, make_run, read_page

BUDGET = 1 << 30


def make_folder(path: Path, *, max_bytes: int = BUDGET, model: str = "m") -> ShardFolder:
    return ShardFolder(path, make_kind(model=model), max_bytes=max_bytes)


def fill(folder: ShardFolder, number: int, length: int) -> None:
    for index in range(length):
        folder.put(*make_run(number, index, folder.kind))


formats = st.sampled_from(FORMAT_NAMES)


@settings(max_examples=100)
@given(data=st.data())
def test_any_run_of_pages_returns_bit_for_bit(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    layers = st.builds(
        LayerSpec,
        num_kv_heads=st.integers(1, 3),
        head_dim=st.sampled_from([64, 128]),
        value_dim=st.sampled_from([64, 128]),
        window=st.none() | st.integers(1, 99),
        keep=st.integers(0, 9),
    )
    page_size, num_pages = data.draw(st.sampled_from([1, 2, 16, 32])), data.draw(st.integers(0, 5))
    k_format, v_format = data.draw(formats), data.draw(formats)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    specs, parts = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        indices = tuple(sorted(data.draw(st.sets(st.sampled_from(range(num_pages)))))) if num_pages else ()
        spec = PoolSpec(
            layers=tuple(data.draw(st.lists(layers, min_size=1, max_size=3))),
            num_pages=len(indices),
            page_size=page_size,
            k_format=k_format,
            v_format=v_format,
        )
        specs.append(spec)
        parts.append(PagePart(indices, rng.integers(0, 256, (len(indices), spec.page_bytes), np.uint8)))
    run = PageRun(
        PageLayoutKey("m", tuple(specs), data.draw(st.text(max_size=9))),
        Digest(rng.bytes(32)),
        tuple(rng.integers(0, 1 << 32, num_pages * page_size).tolist()),
        tuple(parts),
        data.draw(st.none() | st.binary(max_size=9)),
    )
    path = tmp_path_factory.mktemp("run") / "x.safetensors"
    write_run(path, run)
    back = read_run(path)
    for got, want in zip(back.parts, run.parts, strict=True):
        assert got.indices == want.indices
        np.testing.assert_array_equal(got.pages, want.pages)
    assert replace(back, parts=run.parts) == run
    assert back.kind.matches(run.kind)


def test_other_programs_can_read_the_file(tmp_path: Path) -> None:
    _, run = make_run(1, 0, make_kind())
    write_run(tmp_path / "x.safetensors", run)
    with safe_open(tmp_path / "x.safetensors", framework="np") as file:
        np.testing.assert_array_equal(file.get_tensor("pages.0"), run.parts[0].pages)
        metadata = file.metadata()
    assert metadata["model"] == "m"
    assert json.loads(metadata["token_ids"]) == list(run.token_ids)
    assert json.loads(metadata["formats"]) == [["bf16", "fp4"]]
    assert metadata["page_size"] == "4"


@settings(max_examples=100)
@given(data=st.data())
def test_no_altered_byte_is_ever_served(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = make_folder(tmp_path_factory.mktemp("shards"))
    fill(folder, 1, 2)
    digest, run = make_run(1, 1, folder.kind)
    path = folder.path(digest)
    raw = bytearray(path.read_bytes())
    where = data.draw(st.integers(0, len(raw) - 1) | st.integers(0, 1200), label="where")
    match data.draw(st.sampled_from(["cut", "flip", "zeros", "more"])):
        case "cut":
            del raw[where:]
        case "flip":
            raw[where] ^= 1 << data.draw(st.integers(0, 7))
        case "zeros":
            raw[where : where + 512] = bytes(len(raw[where : where + 512]))
        case "more":
            raw += b"more"
    changed = bytes(raw) != path.read_bytes()
    path.write_bytes(raw)
    if changed:
        with pytest.raises(BadPages) as caught:
            read_page(folder, 1, 1)
        assert caught.value.reason in {"torn", "altered", "foreign"}
        assert not path.exists(), "it would be read again and again"
    else:
        np.testing.assert_array_equal(read_page(folder, 1, 1), run.parts[0].pages[0])
    np.testing.assert_array_equal(read_page(folder, 1, 0), make_run(1, 0, folder.kind)[1].parts[0].pages[0])


def test_a_shard_under_another_name_is_not_served(tmp_path: Path) -> None:
    folder, other = make_folder(tmp_path), make_folder(tmp_path, model="other")
    fill(folder, 1, 2)
    fill(other, 1, 1)
    digest, run = make_run(2, 0, folder.kind)
    for source, reason in (
        (folder.path(make_run(1, 0, folder.kind)[0]), "altered"),
        (folder.path(make_run(1, 1, folder.kind)[0]), "altered"),
        (other.path(make_run(1, 0, folder.kind)[0]), "foreign"),
    ):
        folder.path(digest).parent.mkdir(exist_ok=True)
        folder.path(digest).write_bytes(source.read_bytes())
        with pytest.raises(BadPages) as caught:
            folder.get(digest, parent=run.parent, token_ids=run.token_ids)
        assert caught.value.reason == reason
    with pytest.raises(FileNotFoundError):
        read_page(folder, 9, 0)


def test_kinds_of_pages_do_not_meet(tmp_path: Path) -> None:
    kinds = [
        make_kind(),
        make_kind(model="other"),
        make_kind(page_size=8),
        make_kind(k_format="fp16"),
        make_kind(v_format="bf16"),
    ]
    assert len({kind.key for kind in kinds}) == len(kinds)
    assert not any(kinds[0].matches(kind) for kind in kinds[1:])
    bigger_pool = replace(kinds[0], specs=(replace(kinds[0].specs[0], num_pages=99),))
    assert kinds[0].matches(bigger_pool)
    assert bigger_pool.key != ""
    assert ShardFolder(tmp_path, bigger_pool, max_bytes=1).path(Digest(b"a" * 32)) == make_folder(
        tmp_path
    ).path(Digest(b"a" * 32))


def test_the_least_recently_used_file_is_deleted_first(tmp_path: Path) -> None:
    folder, other = make_folder(tmp_path), make_folder(tmp_path, model="other")
    fill(folder, 1, 6)
    fill(other, 1, 6)
    (tmp_path / "notes.txt").write_text("not ours")
    paths = [f.path(digest) for digest in chain_of(1, 6)[1] for f in (folder, other)]
    for age, path in enumerate(reversed(paths)):
        os.utime(path, (1000 - age, 1000 - age))
    read_page(folder, 1, 0)
    size = paths[0].stat().st_size
    small = make_folder(tmp_path, max_bytes=round(size * 8.5))
    pruned = small.prune()
    assert pruned.num_removed == 12 - 7
    assert pruned.num_bytes == sum(path.stat().st_size for path in paths if path.exists())
    assert [path.exists() for path in paths] == [True] + [False] * 5 + [True] * 6
    assert small.prune().num_removed == 0
    assert (tmp_path / "notes.txt").exists()


def test_files_that_a_dead_process_left_go(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    fill(folder, 1, 1)
    path = folder.path(make_run(1, 0, folder.kind)[0])
    old, new = (path.parent / f".{path.stem}.{number * 16}.tmp" for number in "ab")
    for unfinished in (old, new):
        unfinished.write_bytes(b"half")
    past = time.time() - STALE_S - 1
    os.utime(old, (past, past))
    folder.prune()
    assert (old.exists(), new.exists(), path.exists()) == (False, True, True)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path)

    def full(path: Path, _: PageRun) -> None:
        path.write_bytes(b"the beginning")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("octavo.engine.kv_store.folder.write_run", full)
    with pytest.raises(OSError, match="No space"):
        fill(folder, 1, 1)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
