"""How many files a change of a known kind touches: one of that kind, made up, in a copy of the package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"

# An RPC that asks the engine's thread something new: by file, a line and what follows it ("": at the end).
RPC = {
    "proto/octavo/v1/cache.proto": {
        "service Cache {": "\n  // Pages that a prompt may still find, and that nobody holds.\n"
        "  rpc CountIdle(CountIdleRequest) returns (CountIdleResponse);\n",
        "": "\nmessage CountIdleRequest {}\n\nmessage CountIdleResponse {\n  uint64 num_pages = 1;\n}\n",
    },
    "engine/core/commands.py": {
        "": '''

@dataclass(frozen=True, slots=True)
class CountIdle(Command[int]):
    """Cached pages that nobody holds."""

    def execute(self, core: CommandTarget) -> int:
        return core.cache.blocks.num_idle_cached
''',
    },
    "engine/grpc/octavo_v1/cache.py": {
        "    Command,\n": "    CountIdle,\n",
        "": """
    @errors_as_status
    async def CountIdle(self, _request: pb.CountIdleRequest, context: Context) -> pb.CountIdleResponse:
        self._handler.check_operator(context, "count pages of all tenants")
        return pb.CountIdleResponse(num_pages=await self._engine.ask(CountIdle()))
""",
    },
}
CLIENT = """
import asyncio, sys
from dataclasses import replace

sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
import octavo
assert octavo.__file__.startswith(sys.argv[1]), octavo.__file__  # the copy, and not what is installed
from octavo.engine import SamplingParams
from octavo.proto import cache_pb2 as pb
from served import collect, served

async def main():
    async with served() as its:
        await collect(its.client.generate(list(range(1, 41)), SamplingParams(max_tokens=2)))
        print((await its.client.cache.call(pb.CountIdleRequest())).num_pages)

asyncio.run(main())
"""


@pytest.mark.server
@pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed (extra: dev)"
)
def test_an_rpc_that_asks_the_engine_is_three_files_and_the_stubs(tmp_path: Path) -> None:
    package = tmp_path / "octavo"
    ignored = shutil.ignore_patterns("__pycache__", "csrc", "*.so")
    shutil.copytree(ROOT / "src" / "octavo", package, ignore=ignored)
    before = _contents(package)
    for name, additions in RPC.items():
        file = package / name
        text = file.read_text()
        for line, added in additions.items():
            assert not line or text.count(line) == 1, f"{name} has not one line {line!r}"
            text = text.replace(line, line + added) if line else text + added
        file.write_text(text)
    made = [f"--{kind}_out={package / 'proto'}" for kind in ("python", "pyi", "grpc_python")]
    sources = [f"-I{package / 'proto'}", *made, "octavo/v1/cache.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *sources], check=True)  # as `make proto` does
    shutil.rmtree(package / "v1")  # which is a link where it is not a copy
    shutil.copytree(package / "proto" / "octavo" / "v1", package / "v1")
    after = _contents(package)
    changed = {name for name in after if after[name] != before.get(name)}
    assert {name for name in changed if "_pb2" not in name and not name.startswith("v1/")} == set(RPC)
    assert len(RPC) == 3

    path = os.pathsep.join((str(tmp_path), str(SUPPORT)))
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(package)],
        check=False, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 41 // 4  # pages of four positions, of 40 tokens and the first of two


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    }
