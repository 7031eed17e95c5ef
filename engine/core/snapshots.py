"""Saves cached prompts or the whole prefix cache to files, and loads such files."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from octavo.block_manager import Digest, MediaSpan
from octavo.block_manager.digests import root

from ..api.errors import InvalidRequest, NotFound, RequestFailed
from ..kv_store.page_files import SUFFIX, BadPages, read_run, sync, write_run
from ..kv_store.page_runs import Chain, PageLayoutKey, PagePart, PageRun, chains, segments
from ..kv_store.transfer import CachedPrefix
from . import commands
from .commands import AnswerT, Command

MAX_NAME_BYTES = 200  # file systems allow 255; temporary files have longer names
PART_BYTES = 64 * 1024**2  # bytes of pages copied between two steps
PART_PAGES = 65_536  # pages copied between two steps if pages have no bytes (no attention)
MAX_TRIES = 3  # attempts to read a prompt


class RunCommand(Protocol):
    def __call__(self, command: Command[AnswerT], /) -> AnswerT: ...


@dataclass(frozen=True, slots=True)
class SavedPages:
    """Number of saved pages. Missing pages were evicted before they could be read."""

    num_pages: int
    num_tokens: int
    num_bytes: int
    num_missing_pages: int = 0


@dataclass(frozen=True, slots=True)
class LoadedPages:
    """Result of loading, in pages of this engine's size.

    num_pages          pages that became cached
    num_tokens         positions of the newly cached pages
    num_known_pages    pages that were cached already
    num_skipped_pages  pages that did not fit
    converted          description of the conversion; empty for pages of an equal layout
    """

    num_pages: int
    num_tokens: int
    num_known_pages: int
    num_skipped_pages: int
    converted: str = ""


def below(folder: Path, path: str, *, what: str) -> Path:
    parts = path.split("/")
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in parts):
        raise InvalidRequest(f"{what} {path!r} must be a path below the server's --save-dir, like a/b")
    target = folder.resolve()
    for part in parts:
        target /= part
        if len(os.fsencode(part)) > MAX_NAME_BYTES:
            raise InvalidRequest(
                f"each part of {what} must have at most {MAX_NAME_BYTES} bytes, got {len(part)} "
                "characters; shorten it"
            )
        if target.is_symlink():
            raise InvalidRequest(
                f"{what} {path!r} goes through the symbolic link {part!r}; give a path without links"
            )
    return target


def save_prompt(
    run_command: RunCommand, path: Path, tokens: list[int], salt: bytes, media: tuple[MediaSpan, ...] = ()
) -> SavedPages:
    """Write the cached full pages of a prompt to one file.

    Raises NotFound if no page is cached, InvalidRequest if the file exists, NotConfigured without a prefix
    cache, and RequestFailed if writing fails.
    """
    if path.suffix != SUFFIX:
        raise InvalidRequest(
            f"the file of a saved prompt must end with {SUFFIX}; name it {path.name}{SUFFIX}"
        )
    _check_new(path)
    found = _read_prompt(run_command, tokens, salt, media)
    if not found.run.num_pages:
        raise NotFound(
            f"none of these {len(tokens)} tokens is cached, so there is nothing to save; only full pages "
            "are cached, so send the prompt first, with the same salt"
        )
    with _new(path) as unfinished:
        write_run(unfinished, found.run)
        sync(unfinished)
    return SavedPages(
        found.run.num_pages, len(found.run.token_ids), path.stat().st_size, found.num_missing_pages
    )


def save_all(run_command: RunCommand, path: Path) -> SavedPages:
    """Write every cached page to a new folder. Raises as ``save_prompt`` does."""
    _check_new(path)
    num_pages = num_tokens = num_bytes = num_missing = 0
    kind = run_command(commands.get_page_layout())
    with _new(path) as unfinished:
        unfinished.mkdir()
        for number, chain in enumerate(
            chains(run_command(commands.list_pages()), _part(kind), page_size=kind.page_size)
        ):
            run = _read_chain(run_command, kind, chain)
            file = unfinished / f"{number:06}{SUFFIX}"
            write_run(file, run)
            sync(file)
            count = len(run.parts[0].indices)
            num_pages += count
            num_tokens += count * kind.page_size
            num_bytes += file.stat().st_size
            num_missing += 0 if any(part.indices for part in run.parts) else run.num_pages
    return SavedPages(num_pages, num_tokens, num_bytes, num_missing)


def load(run_command: RunCommand, path: Path) -> LoadedPages:
    """Insert the pages that ``save_prompt`` or ``save_all`` wrote into the prefix cache.

    Pages of another format or page size are converted. Raises NotFound if there is no file, and
    InvalidRequest, before any page is inserted, if a file is damaged or from another model.
    """
    kind = run_command(commands.get_page_layout())
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise NotFound(f"there are no saved pages at {path.name}; give the path of an earlier save")
    for prefix, run in _sequences(files, kind):
        for _ in segments(run, kind, len(prefix.tokens) - len(run.token_ids)):
            pass  # reading checks the files
    total = LoadedPages(0, 0, 0, 0)
    for prefix, run in _sequences(files, kind):
        total = _insert(run_command, kind, prefix, run, total)
    return total


class _Prefix(NamedTuple):
    tokens: list[int]
    media: tuple[MediaSpan, ...]


def _insert(
    run_command: RunCommand, kind: PageLayoutKey, prefix: _Prefix, run: PageRun, total: LoadedPages
) -> LoadedPages:
    size = kind.page_size
    start = len(prefix.tokens) - len(run.token_ids)
    new = known = skipped = 0
    num_states = len(run.parts[-1].indices) if kind.states else 0
    for segment in segments(run, kind, start):
        num_states -= segment.group == len(kind.specs)
        for first in range(0, len(segment.pages), part := _part(kind)):
            some, at = segment.pages[first : first + part], segment.first + first
            known_tokens = tuple(prefix.tokens[: (at + len(some)) * size])
            inserted = run_command(
                commands.insert_pages(known_tokens, some, run.salt or b"", at, segment.group, prefix.media)
            )
            if inserted is None:
                skipped += len(some)
            elif segment.group == 0:
                new, known = new + inserted, known + len(some) - inserted
    skipped += num_states
    return LoadedPages(
        total.num_pages + new,
        total.num_tokens + new * size,
        total.num_known_pages + known,
        total.num_skipped_pages + skipped,
        total.converted or ("" if run.kind.matches(kind) else f"{run.kind.describe()} to {kind.describe()}"),
    )


def _sequences(files: list[Path], kind: PageLayoutKey) -> Iterator[tuple[_Prefix, PageRun]]:
    ends: dict[tuple[Digest, bytes], _Prefix] = {}
    for file in files:
        run = _read(file, kind)
        salt = run.salt or b""
        before = _Prefix([], ()) if run.parent == root(salt) else ends.get((run.parent, salt))
        if before is None:
            raise InvalidRequest(
                f"the save is incomplete: no file has the pages before those of {file.name}; save again"
            )
        start = len(before.tokens)
        own = (span._replace(start=start + span.start) for span in run.media if span.start >= 0)
        prefix = _Prefix([*before.tokens, *run.token_ids], (*before.media, *own))
        ends[run.digests()[-1], salt] = prefix
        yield prefix, run


def _read(file: Path, kind: PageLayoutKey) -> PageRun:
    try:
        run = read_run(file)
    except BadPages as error:
        raise InvalidRequest(f"nothing was loaded: {error}") from None
    except OSError as error:
        raise InvalidRequest(f"nothing was loaded: {file.name} cannot be read: {error.strerror}") from None
    if run.kind.model != kind.model:
        raise InvalidRequest(
            f"nothing was loaded: {file.name} was saved with another model; start the server with that model"
        )
    layers = [[spec.layers for spec in some.specs] for some in (run.kind, kind)]
    if layers[0] != layers[1] or run.kind.context != kind.context:
        raise InvalidRequest(
            f"nothing was loaded: {file.name} was saved with other attention windows or ranks; start the "
            "server with the same --max-model-len, --sink-pages, --residual-pages, --tensor-parallel and "
            "--pipeline-parallel"
        )
    if any(one.entries != other.entries for one, other in zip(run.kind.states, kind.states, strict=False)):
        raise InvalidRequest(
            f"nothing was loaded: the states of recurrent layers in {file.name} have another layout than "
            "this server's; start the server with the --backend that saved the file"
        )
    return run


@dataclass(frozen=True, slots=True)
class _PromptPages:
    run: PageRun
    num_missing_pages: int


def _read_prompt(
    run_command: RunCommand, tokens: list[int], salt: bytes, media: tuple[MediaSpan, ...]
) -> _PromptPages:
    kind = run_command(commands.get_page_layout())
    digests = tuple(PageRun(kind, root(salt), tuple(tokens), (), salt, media).digests())
    most = 0
    for _ in range(MAX_TRIES):
        prefix = run_command(commands.find_prefix(digests))
        most = max(most, prefix.num_pages)
        parts = _read_parts(run_command, kind, digests, prefix)
        whole = PageRun(kind, root(salt), tuple(tokens), parts, salt, media)
        gap = _first_gap(whole, prefix)
        digests = digests[:gap]
        if gap == prefix.num_pages:
            break
    return _PromptPages(_shortened(whole, len(digests)), most - len(digests))


def _read_parts(
    run_command: RunCommand, kind: PageLayoutKey, digests: tuple[Digest, ...], prefix: CachedPrefix
) -> tuple[PagePart, ...]:
    read: list[list[PagePart]] = [[] for _ in prefix.needed]
    for first in range(0, prefix.num_pages, portion := _part(kind)):
        stop = min(first + portion, prefix.num_pages)
        wanted = tuple(tuple(i - first for i in needed if first <= i < stop) for needed in prefix.needed)
        for parts, part in zip(
            read, run_command(commands.read_pages(digests[first:stop], wanted)), strict=True
        ):
            parts.append(PagePart(tuple(first + index for index in part.indices), part.pages))
    return tuple(
        PagePart(
            tuple(index for part in parts for index in part.indices),
            np.concatenate([part.pages for part in parts]) if parts else np.empty((0, 0), np.uint8),
        )
        for parts in read
    )


def _first_gap(run: PageRun, prefix: CachedPrefix) -> int:
    gone = (
        set(needed).difference(part.indices) for needed, part in zip(prefix.needed, run.parts, strict=True)
    )
    return min((min(pages) for pages in gone if pages), default=prefix.num_pages)


def _shortened(run: PageRun, num_pages: int) -> PageRun:
    parts = []
    for part in run.parts:
        count = bisect_left(part.indices, num_pages)
        parts.append(PagePart(part.indices[:count], part.pages[:count]))
    tokens = run.token_ids[: num_pages * run.kind.page_size]
    media = tuple(span for span in run.media if span.start < len(tokens))
    return replace(run, token_ids=tokens, parts=tuple(parts), media=media)


def _read_chain(run_command: RunCommand, kind: PageLayoutKey, chain: Chain) -> PageRun:
    parent = root(chain.salt) if chain.parent is None else chain.parent
    return PageRun(
        kind, parent, chain.tokens, run_command(commands.read_pages(chain.digests)), chain.salt, chain.media
    )


def _part(kind: PageLayoutKey) -> int:
    num_bytes = sum(spec.page_bytes for spec in kind.specs)
    num_bytes += sum(states.nbytes for states in kind.states if states.nbytes <= num_bytes)
    return min(max(1, PART_BYTES // max(num_bytes, 1)), PART_PAGES)


def _check_new(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise InvalidRequest(f"{path.name} is there already; choose another name or remove it")


def _publish(unfinished: Path, path: Path) -> None:
    try:
        if unfinished.is_dir():
            path.mkdir(mode=0o700)
            unfinished.rename(path)
        else:
            os.link(unfinished, path)
    except FileExistsError:
        raise InvalidRequest(f"{path.name} is there already; choose another name or remove it") from None


@contextlib.contextmanager
def _new(path: Path) -> Iterator[Path]:
    unfinished = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield unfinished
        _publish(unfinished, path)
        sync(path.parent)
    except OSError as error:
        raise RequestFailed(f"{path.name} cannot be written: {error.strerror or error}") from error
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        unfinished.unlink(missing_ok=True)
