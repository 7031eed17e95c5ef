from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from fake_images import RULES, FakeImages
from fakes import FakeCore, small_config
from ledger_runner import LedgerRunner
from octavo.block_manager.digests import root
from octavo.engine import LLM, EngineConfig, SamplingParams
from octavo.engine.api.errors import InvalidRequest, NotConfigured, NotFound
from octavo.engine.api.image import PromptImage
from octavo.engine.api.outputs import RequestOutput
from octavo.engine.api.prompt import EncodedPrompt
from octavo.engine.core import commands
from octavo.engine.core import snapshots as saved
from octavo.engine.core.commands import AnswerT, Command
from octavo.engine.core.snapshots import LoadedPages, below, load, save_all, save_prompt
from octavo.engine.kv_store.page_files import read_run, write_run
from octavo.engine.kv_store.page_runs import PageLayoutKey, PagePart, PageRun

PROMPT = [number % 250 for number in range(101)]
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    engines: list[LLM] = []

    def make(core: FakeCore | None = None, **changes: object) -> LLM:
        config = small_config(save_dir=tmp_path, **changes)
        engines.append(LLM(config, core_factory=core or FakeCore()))
        return engines[-1]

    yield make
    for llm in engines:
        llm.close()


def ask_one(llm: LLM, prompt: list[int]) -> RequestOutput:
    (output,) = llm.generate([prompt], FOUR, progress=False)
    return output


def test_a_saved_prompt_is_found_by_another_engine(engine: Callable[..., LLM], tmp_path: Path) -> None:
    path = tmp_path / "chats" / "first.safetensors"
    first = engine()
    done = first.save_prompt(PROMPT, path)
    assert (done.num_pages, done.num_tokens, done.num_bytes) == (25, 100, path.stat().st_size)
    second = engine()
    assert second.load_prompt(path) == LoadedPages(25, 100, 0, 0)
    assert second.load_prompt(path) == LoadedPages(0, 0, 25, 0)
    output = ask_one(second, PROMPT)
    assert output.cached_tokens == 100
    assert output.outputs[0].token_ids == ask_one(first, PROMPT).outputs[0].token_ids
    assert [entry for entry in path.parent.iterdir() if entry != path] == [], "nothing unfinished is left"


def test_large_prompts_move_in_portions(
    engine: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "PART_BYTES", 3 * 4 * 16)  # bytes of three pages
    path = tmp_path / "x.safetensors"
    assert engine().save_prompt(PROMPT, path).num_pages == 25
    llm = engine()
    assert llm.load_prompt(path).num_pages == 25
    assert ask_one(llm, PROMPT).cached_tokens == 100


def test_a_whole_cache(engine: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "PART_BYTES", 5 * 4 * 16)
    prompts = [PROMPT[:41], [*PROMPT[:20], *range(30, 50)], [*PROMPT[:20], *range(60, 90)], [7] * 30]
    fake = FakeCore()
    first = engine(fake)
    want = [ask_one(first, prompt) for prompt in prompts]
    done = save_all(first._run_command, tmp_path / "cache")
    core = fake.core
    assert core is not None
    assert done.num_pages == core.gauges.pages_idle_cached
    assert done.num_tokens == 4 * done.num_pages
    second = engine()
    assert load(second._run_command, tmp_path / "cache") == LoadedPages(done.num_pages, done.num_tokens, 0, 0)
    for prompt, output in zip(prompts, want, strict=True):
        found = ask_one(second, prompt)
        assert found.cached_tokens == (len(prompt) - 1) // 4 * 4
        assert found.outputs[0].token_ids == output.outputs[0].token_ids
    again = save_all(second._run_command, tmp_path / "again")
    assert again.num_pages >= done.num_pages, "loaded pages are known, too"


def ask_images(llm: LLM, prompt: EncodedPrompt) -> RequestOutput:
    (output,) = llm.generate([prompt], FOUR, progress=False)
    return output


def with_images(*letters: bytes) -> EncodedPrompt:
    """Return a prompt with images of 14 tokens each; the first image begins at position 21."""
    ids, images = PROMPT[:21], []
    for letter in letters:
        images.append(PromptImage(len(ids), 2, 7, letter * 32, b""))
        ids = [*ids, *[250] * 14, *PROMPT[:9]]
    return EncodedPrompt(ids, tuple(images))


def with_vision() -> FakeCore:
    return FakeCore(images=FakeImages(rules=replace(RULES, token=250)))


@pytest.mark.parametrize("whole", [False, True], ids=["prompt", "cache"])
def test_a_saved_prompt_is_found_with_its_images_alone(
    engine: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(saved, "PART_BYTES", 3 * 4 * 16)  # bytes of three pages
    first, path = engine(with_vision(), vision=True), tmp_path / "x.safetensors"
    prompt, other = with_images(b"a", b"b"), with_images(b"a", b"c")
    ask_one(first, PROMPT[:40])
    want = ask_images(first, prompt)
    if whole:
        save_all(first._run_command, path)
    else:
        assert first.save_prompt(prompt, path).num_tokens == 64
    second = engine(with_vision(), vision=True)
    assert second.load_prompt(path).num_skipped_pages == 0
    found = ask_images(second, prompt)
    assert (found.cached_tokens, found.outputs[0].token_ids) == (64, want.outputs[0].token_ids)
    assert ask_images(second, other).cached_tokens == 44, "up to the second image"
    assert ask_images(second, with_images(b"c")).cached_tokens == 20, "up to the first image"


@pytest.mark.parametrize("page_size", [2, 8])
def test_saved_images_load_with_another_page_size(
    engine: Callable[..., LLM], tmp_path: Path, page_size: int
) -> None:
    prompt, path = with_images(b"a", b"b"), tmp_path / "x.safetensors"
    engine(with_vision(), vision=True).save_prompt(prompt, path)
    llm = engine(with_vision(), vision=True, page_size=page_size)
    assert llm.load_prompt(path).converted
    kind = llm._run_command(commands.get_page_layout())
    run = PageRun(kind, root(b""), tuple(prompt.ids), (), media=prompt.media)
    assert llm._run_command(commands.find_prefix(tuple(run.digests()))).num_pages == 64 // page_size


def test_evicted_pages_are_not_remembered_for_ever(engine: Callable[..., LLM], tmp_path: Path) -> None:
    fake = FakeCore()
    llm = engine(fake, num_pages=32)
    for number in range(12):
        ask_one(llm, [number, *PROMPT[:60]])
    core = fake.core
    assert core is not None
    assert len(core.cache.blocks.page_index) <= 2 * 32
    assert save_all(llm._run_command, tmp_path / "cache").num_pages == core.gauges.pages_idle_cached


def test_saving_holds_no_page_that_a_request_needs(
    engine: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "PART_BYTES", 8 * 16 * 16)  # bytes of eight pages
    fake = FakeCore()
    llm = engine(fake, page_size=16, num_pages=64, max_step_tokens=512)
    cached, other = [number % 250 for number in range(900)], [7] * 800
    ask_one(llm, cached)
    served: list[RequestOutput] = []

    def busy(command: Command[AnswerT]) -> AnswerT:
        if command.name == "read_pages" and len(command.args[0]) == 8 and not served:
            served.append(ask_one(llm, other))
        return llm._run_command(command)

    done = save_prompt(busy, tmp_path / "x.safetensors", cached, b"")
    assert len(served[0].outputs[0].token_ids) == 4
    assert done.num_pages < 56
    assert done.num_pages + done.num_missing_pages == 56, "what gave way is left out, and told"
    second = engine(page_size=16, num_pages=64, max_step_tokens=512)
    assert second.load_prompt(tmp_path / "x.safetensors").num_pages == done.num_pages
    assert ask_one(second, cached).cached_tokens == done.num_tokens
    assert fake.core is not None
    fake.core._blocks.check()
    assert fake.core.gauges.pages_held == 0


def test_an_often_evicted_prompt_is_saved_as_far_as_cached(
    engine: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "PART_BYTES", 5 * 4 * 16)
    llm = engine()
    ask_one(llm, PROMPT)
    lost: list[int] = []

    def losing(command: Command[AnswerT]) -> AnswerT:
        answer = llm._run_command(command)
        if command.name != "read_pages":
            return answer
        part: PagePart = answer[0]  # type: ignore[index]  # mypy does not narrow by the command's type
        count = len(part.indices) - 1
        lost.append(count)
        return cast(AnswerT, (PagePart(part.indices[:count], part.pages[:count]),))

    done = save_prompt(losing, tmp_path / "x.safetensors", PROMPT, b"")
    assert done.num_pages + done.num_missing_pages == 25
    assert lost == [4, 4, 4, 4, 4, 3, 2], "three times: all five portions, then what was left"
    assert done.num_pages == engine().load_prompt(tmp_path / "x.safetensors").num_pages == 2


def test_a_pool_that_is_too_small_takes_none_of_it(engine: Callable[..., LLM], tmp_path: Path) -> None:
    engine().save_prompt(PROMPT, tmp_path / "x.safetensors")
    llm = engine(num_pages=20)
    assert llm.load_prompt(tmp_path / "x.safetensors") == LoadedPages(0, 0, 0, 25)
    assert ask_one(llm, PROMPT[:40]).cached_tokens == 0


class OtherModel(LedgerRunner):
    @property
    def page_layout_key(self) -> PageLayoutKey:
        return replace(super().page_layout_key, model="another")


def edit(path: Path, change: Callable[[bytearray], object]) -> None:
    raw = bytearray(path.read_bytes())
    change(raw)
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.pop(), "not a complete file"),
        (lambda raw: raw.__delitem__(slice(40, None)), "not a complete file"),
        (lambda raw: raw.__setitem__(-1, raw[-1] ^ 1), "checksum"),
        (lambda raw: raw.__setitem__(raw.index(b'"token_ids": "[') + 15, ord("9")), "checksum"),
    ],
    ids=["shorter", "header cut", "page altered", "tokens altered"],
)
def test_a_damaged_file_changes_nothing(
    change: Callable[[bytearray], object], words: str, engine: Callable[..., LLM], tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    engine().save_prompt(PROMPT, path)
    edit(path, change)
    llm = engine()
    with pytest.raises(InvalidRequest, match=f"nothing was loaded: .*{words}"):
        llm.load_prompt(path)
    assert ask_one(llm, PROMPT).cached_tokens == 0
    assert path.exists(), "it is the user's file"


def test_one_damaged_file_of_a_cache_changes_nothing(engine: Callable[..., LLM], tmp_path: Path) -> None:
    first = engine()
    for prompt in (PROMPT, [7] * 30):
        ask_one(first, prompt)
    save_all(first._run_command, tmp_path / "cache")
    edit(sorted((tmp_path / "cache").iterdir())[-1], lambda raw: raw.pop())
    llm = engine()
    with pytest.raises(InvalidRequest, match="not a complete file"):
        load(llm._run_command, tmp_path / "cache")
    assert ask_one(llm, PROMPT).cached_tokens == ask_one(llm, [7] * 30).cached_tokens == 0


def test_a_file_without_earlier_pages_is_refused(
    engine: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "PART_BYTES", 5 * 4 * 16)
    first = engine()
    ask_one(first, PROMPT)
    save_all(first._run_command, tmp_path / "cache")
    (tmp_path / "cache" / "000001.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"before those of 000002"):
        load(engine()._run_command, tmp_path / "cache")


def test_another_model_s_pages_are_refused(
    engine: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine().save_prompt(PROMPT, tmp_path / "x.safetensors")
    monkeypatch.setattr("fakes.LedgerRunner", OtherModel)
    llm = engine()
    with pytest.raises(InvalidRequest, match="with another model"):
        llm.load_prompt(tmp_path / "x.safetensors")
    assert ask_one(llm, PROMPT).cached_tokens == 0


def test_a_salt_is_kept(engine: Callable[..., LLM], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    engine().save_prompt(PROMPT, path)
    run = read_run(path)
    path.unlink()
    write_run(path, replace(run, salt=b"tenant", parent=root(b"tenant")))
    llm = engine()
    assert llm.load_prompt(path).num_pages == 25
    assert ask_one(llm, PROMPT).cached_tokens == 0, "another tenant's"
    copy = tmp_path / "copy.safetensors"
    assert save_prompt(llm._run_command, copy, PROMPT, b"tenant").num_pages == 25
    np.testing.assert_array_equal(read_run(copy).parts[0].pages, run.parts[0].pages)


def test_failed_saves_name_the_cause(engine: Callable[..., LLM], tmp_path: Path) -> None:
    llm = engine()
    with pytest.raises(NotFound, match="none of these 101 tokens is cached"):
        save_prompt(llm._run_command, tmp_path / "x.safetensors", PROMPT, b"")
    with pytest.raises(InvalidRequest, match=r"name it x\.safetensors"):
        llm.save_prompt(PROMPT, tmp_path / "x")
    llm.save_prompt(PROMPT, tmp_path / "x.safetensors")
    with pytest.raises(InvalidRequest, match="is there already"):
        llm.save_prompt(PROMPT, tmp_path / "x.safetensors")
    with pytest.raises(NotFound, match="no saved pages"):
        llm.load_prompt(tmp_path / "none.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="no saved pages"):
        load(llm._run_command, tmp_path / "empty")
    with pytest.raises(NotConfigured, match="prefix cache is off"):
        engine(prefix_cache=False).save_prompt(PROMPT, tmp_path / "y.safetensors")


def test_only_paths_below_the_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "saved", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "file").symlink_to(outside / "file")
    for path in ("", "/etc/x", "../outside/x", "a/../../x", "./x", "a//b", "a/", "x\0y", "..\\x"):
        with pytest.raises(InvalidRequest, match="must be a path below"):
            below(folder, path, what="path")
    for path in ("link", "link/x", "file"):
        with pytest.raises(InvalidRequest, match="goes through the symbolic link"):
            below(folder, path, what="path")
    assert below(folder, "a/b.safetensors", what="path") == folder.resolve() / "a" / "b.safetensors"
    linked = tmp_path / "to_saved"
    linked.symlink_to(folder)
    assert below(linked, "x", what="path") == folder.resolve() / "x", "the operator's own link"


def test_a_real_model_s_pages_are_converted(tmp_path: Path) -> None:
    base = EngineConfig(num_pages=40, page_size=16, max_running=4, max_step_tokens=128)
    path, prompt = tmp_path / "x.safetensors", [number * 7 % 200 for number in range(150)]
    with LLM(base) as llm:
        assert llm.save_prompt(prompt, path).num_tokens == 144
        want = ask_one(llm, prompt).outputs[0].token_ids
    with LLM(replace(base, page_size=8, num_pages=80)) as llm:
        assert llm.load_prompt(path) == LoadedPages(
            18, 144, 0, 0, "bf16 pages of 16 tokens to bf16 pages of 8 tokens"
        )
        output = ask_one(llm, prompt)
        assert (output.cached_tokens, output.outputs[0].token_ids) == (144, want)
    with LLM(replace(base, kv_format="fp4", page_size=32, residual_pages=0)) as llm:
        loaded = llm.load_prompt(path)
        assert (loaded.num_pages, loaded.num_tokens) == (4, 128)
        assert loaded.converted == "bf16 pages of 16 tokens to fp4 pages of 32 tokens"
        assert ask_one(llm, prompt).cached_tokens == 128
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "a/" + "\u00e9" * 150 + "/b"])
def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="must have at most 200 bytes"):
        below(tmp_path, name, what="path")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_of_two_saves_of_one_name_the_first_stays(tmp_path: Path, kind: str) -> None:
    def write(path: Path, text: str) -> None:
        if kind == "folder":
            path.mkdir()
            path /= "0"
        path.write_text(text)

    path = tmp_path / "saved"

    def save() -> None:
        with saved._new(path) as unfinished:
            write(unfinished, "second")
            write(path, "first")

    with pytest.raises(InvalidRequest, match="is there already"):
        save()
    assert (path / "0" if kind == "folder" else path).read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
