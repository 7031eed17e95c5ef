from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fakes import small_config
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.cli import main
from served import Served, collect, served

pytestmark = pytest.mark.server

PROMPT = list(range(40, 62))  # five pages of 4 tokens, and two more tokens


class Background:
    def __init__(self, **config: Any) -> None:
        self.config = small_config(**config)
        self.its: Served | None = None
        self.loop = asyncio.new_event_loop()
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._main)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve())
        self.loop.close()

    async def _serve(self) -> None:
        async with served(config=self.config) as self.its:
            self._ready.set()
            await self._end.wait()

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)

    def say(self, ids: list[int], name: str) -> None:
        assert self.its is not None
        deltas = self.its.engine.generate(ids, SamplingParams(max_tokens=1), request_id=name)
        asyncio.run_coroutine_threadsafe(collect(deltas), self.loop).result(30)


@contextmanager
def background(**config: Any) -> Iterator[Background]:
    server = Background(**config)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def octavo(server: Background, *words: str) -> int:
    assert server.its is not None
    return main(["cache", *words, "--connect", server.its.address])


def test_every_action_prints_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    def last() -> tuple[list[str], dict[str, Any]]:
        lines = capsys.readouterr().out.splitlines()
        return lines[:-1], json.loads(lines[-1])

    with background(max_pinned_pages=8) as server:
        server.say(PROMPT, "first")
        server.say(PROMPT, "again")
        server.say([*PROMPT[:8], *range(90, 99)], "other")
        assert octavo(server, "stats", "--json") == 0
        text, found = last()
        assert "prefixes that saved most" in "\n".join(text)
        assert any("  20 saved, 1 hits, 20 tokens '" in line for line in text), text
        assert (found["query_tokens"], found["hit_tokens"]) == (61, 28)
        assert {miss["reason"]: miss["tokens"] for miss in found["misses"]} == {"new": 28, "partial_page": 5}
        assert [prefix["tokens_saved"] for prefix in found["prefixes"]] == [20, 8]
        assert found["pages"].keys() == {"held", "idle_cached", "idle_empty"}

        assert octavo(server, "explain", "other", "--json") == 0
        text, found = last()
        assert text == [found["text"]]
        assert (found["cached_tokens"], found["reason"], found["miss_position"]) == (8, "new", 8)

        assert octavo(server, "pin", "mine", "--request-id", "first", "--json") == 0
        assert last()[1] == {"num_tokens": 20, "prefix_tokens": 23, "pinned_pages": 5}
        assert octavo(server, "pin", "text", "--text", bytes(PROMPT).decode(), "--json") == 0
        assert last()[1]["pinned_pages"] == 5, "the same pages"
        assert octavo(server, "unpin", "mine") == octavo(server, "unpin", "text") == 0
        assert capsys.readouterr().out.splitlines()[-1] == "text was unpinned; 0 pages of other pins remain"

        assert octavo(server, "watch", "--start", "1", "--events", "2", "--json") == 0
        text, found = last()
        assert text[1:] == ["1 stored 5 pages", "2 stored 2 pages"]
        assert found == {"num_events": 2, "number": 2}

        assert octavo(server, "flush", "--json") == 0
        assert last()[1] == {"num_pages": 7}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["explain", "nobody"], 1, "no request with this id"),
        (["unpin", "nobody"], 1, "'nobody'"),
        (["pin", "x", "--prompt-ids", "1,2,3,4"], 1, "--max-pinned-pages"),
        (["stats", "--prefixes", "-1"], 2, "--prefixes: must be a whole number of at least 0"),
        (["stats", "--prefixes", "99999"], 2, "num_prefixes must be between 0 and"),
        (["watch", "--start", "99"], 1, "got 99"),
        (["pin", "x"], 2, "one of the arguments"),
    ],
)
def test_failures_print_one_line(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with background() as server:
        assert octavo(server, *words) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_without_a_server_that_is_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stats", "--connect", "127.0.0.1:9"]) == 1
    assert "no server answers at 127.0.0.1:9" in capsys.readouterr().err
    assert main(["cache", "stats"]) == 2
    assert "--connect" in capsys.readouterr().err
