"""A request calls the functions that ARCHITECTURE.md lists."""

from __future__ import annotations

import ast
import asyncio
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from octavo.engine.api.address import Address
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.client.client import Client
from octavo.engine.frontend.async_engine import AsyncEngine
from octavo.engine.grpc.server import GrpcServer
from octavo.kernels.backends import choose_backend
from served import collect

ROOT = Path(__file__).resolve().parents[2]
SECTION = re.compile(r"^### Function by function\n(.*?)^```\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
STEP = re.compile(r"^(?:\w+(?: \w+)*)? +(\S+\.py) +([\w.]+)$")
PATHS = {"token": 0, "page": 1}


def path_of(text: str, name: str) -> tuple[str, list[tuple[str, str]]]:
    prose, listed = SECTION.findall(text)[PATHS[name]]
    steps = [STEP.match(line) for line in listed.splitlines()]
    assert all(steps), f"a line of the path of a {name} names no function: {listed}"
    return prose, [(step[1], step[2]) for step in steps if step]


def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = {node.name for node in tree.body if isinstance(node, kinds)}
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            found |= {f"{owner.name}.{node.name}" for node in owner.body if isinstance(node, kinds)}
    return found


@pytest.mark.parametrize("name", PATHS)
def test_functions_of_documented_paths_exist(name: str) -> None:
    prose, steps = path_of((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), name)
    missing = [f"{file}: {function}" for file, function in steps if function not in functions_of(file)]
    assert not missing, missing
    assert len(set(steps)) == len(steps), "a function is named twice"
    assert f"{len(steps)} functions in {len({file for file, _ in steps})} files" in " ".join(prose.split())


@contextmanager
def watched(found: dict[tuple[str, str], list[tuple[str, str]]]) -> Iterator[None]:
    places: dict[str, str | None] = {}

    def place(frame: FrameType) -> tuple[str, str] | None:
        name = frame.f_code.co_filename
        if name not in places:
            path = Path(name).resolve()
            places[name] = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None
        file = places[name]
        return None if file is None else (file, frame.f_code.co_qualname)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (called := place(frame)) is None or called in found:
            return
        above = found[called] = []
        outer = frame.f_back
        while outer is not None:
            if (caller := place(outer)) is not None:
                above.append(caller)
            outer = outer.f_back

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def serve_one(found: dict[tuple[str, str], list[tuple[str, str]]]) -> None:
    engine = AsyncEngine(EngineConfig(model="demo", backend="cpu", speculate="off", num_pages=64))
    await engine.start()
    server = GrpcServer(engine)
    try:
        async with Client(str(await server.start(Address("127.0.0.1", 0)))) as client:
            found.clear()
            await collect(client.generate(list(range(1, 81)), SamplingParams(max_tokens=2)))
    finally:
        await server.stop()
        await engine.stop()


@pytest.mark.server
def test_a_request_passes_every_function_of_the_paths() -> None:
    try:
        choose_backend("cpu")
    except ValueError as error:
        pytest.skip(str(error))
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    with watched(found):
        asyncio.run(serve_one(found))
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for name in PATHS:
        _, steps = path_of(text, name)
        missed = [step for step in steps if step not in found]
        assert not missed, f"no request passes these of the path of a {name}: {missed}"
    _, token = path_of(text, "token")
    begins = [step[1] for step in token if not set(found[step]) & set(token)]
    assert len(begins) <= 5, f"these are not called by others of their path: {begins}"
