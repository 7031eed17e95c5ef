"""Number of files that a change of a known kind touches."""

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

Change = dict[str, dict[str, str]]
THE_COPY = """
import sys

sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
import octavo
assert octavo.__file__.startswith(sys.argv[1]), octavo.__file__  # and not what is installed
"""

# The changes that a new RPC needs: for each file, a line and the text after it ("": at the end).
RPC: Change = {
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
        "        return pb.FlushResponse(num_pages=await self._engine.ask(FlushCache()))\n": """
    @errors_as_status
    async def CountIdle(self, _request: pb.CountIdleRequest, context: Context) -> pb.CountIdleResponse:
        self._handler.check_operator(context, "count pages of all tenants")
        return pb.CountIdleResponse(num_pages=await self._engine.ask(CountIdle()))
""",
    },
}
ASK_FOR_IT = """
import asyncio

from octavo.engine import SamplingParams
from octavo.proto import cache_pb2 as pb
from served import collect, served

async def main():
    async with served() as its:
        await collect(its.client.generate(list(range(1, 41)), SamplingParams(max_tokens=2)))
        print((await its.client.cache.call(pb.CountIdleRequest())).num_pages)

asyncio.run(main())
"""

# A new parameter that changes logits: banned token IDs.
PARAMETER: Change = {
    "engine/api/sampling_params.py": {
        'flag="--stop-id", vllm="stop_token_ids",\n    )  # fmt: skip\n': """\
    banned_ids: tuple[int, ...] = parameter(
        (), "token id that never comes; repeatable", shown="none",
        kind="ints", metavar="N", flag="--banned-id",
    )
""",
    },
    "engine/executor/sampling/logits_processors.py": {
        "np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))\n": """\
        self._bias_ids = np.append(self._bias_ids, np.array(params.banned_ids, np.intp))
        self._bias = np.append(self._bias, np.full(len(params.banned_ids), -np.inf, np.float32))
""",
        "self.any = bool(params.logit_bias or bad_ids) or self.follows": " or bool(params.banned_ids)",
    },
    "proto/octavo/v1/generation.proto": {
        "  repeated uint32 stop_ids = 13;\n": "  // Token ids that never come.\n"
        "  repeated uint32 banned_ids = 999;\n",
    },
}
BAN_TOKENS = """
import contextlib, io

from octavo.engine import LLM, EngineConfig
from octavo.engine.cli import main
from octavo.engine.grpc.octavo_v1.messages import params_message, params_of
from octavo.proto import generation_pb2 as pb

with LLM(EngineConfig(model="demo", backend="reference")) as llm:
    banned, tokens = [], []
    for _ in range(3):
        params = params_of(pb.SamplingParams(max_tokens=1, banned_ids=banned))
        tokens += llm.generate([list(range(1, 9))], params)[0].outputs[0].token_ids
        banned = tokens[:]
assert list(params_message(params).banned_ids) == tokens[:2]
with contextlib.redirect_stdout(io.StringIO()) as said:
    assert main(["generate", "--help"]) == 0
assert "--banned-id N" in said.getvalue()
print(len(set(tokens)))
"""

needs_protoc = pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed (extra: dev)"
)


@pytest.mark.server
@needs_protoc
def test_an_rpc_that_asks_the_engine_is_three_files_and_the_stubs(tmp_path: Path) -> None:
    assert len(RPC) == 3
    assert int(_changed(tmp_path, RPC, ASK_FOR_IT)) == 41 // 4


@needs_protoc
def test_a_logit_parameter_is_three_files_and_the_stubs(tmp_path: Path) -> None:
    """The files: wire, command line, check, logits."""
    assert len(PARAMETER) == 3
    assert int(_changed(tmp_path, PARAMETER, BAN_TOKENS)) == 3


def _changed(folder: Path, change: Change, program: str) -> str:
    package = folder / "octavo"
    ignored = shutil.ignore_patterns("__pycache__", "csrc", "*.so")
    shutil.copytree(ROOT / "src" / "octavo", package, ignore=ignored)
    before = _contents(package)
    for name, additions in change.items():
        file = package / name
        text = file.read_text()
        for line, added in additions.items():
            assert not line or text.count(line) == 1, f"{name} has not one line {line!r}"
            text = text.replace(line, line + added) if line else text + added
        file.write_text(text)
    made = [f"--{kind}_out={package / 'proto'}" for kind in ("python", "pyi", "grpc_python")]
    sources = [
        f"-I{package / 'proto'}",
        *made,
        *(f"octavo/v1/{name}.proto" for name in ("generation", "cache")),
    ]
    # As ``make proto`` does.
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *sources], check=True)
    shutil.rmtree(package / "v1")
    shutil.copytree(package / "proto" / "octavo" / "v1", package / "v1")
    after = _contents(package)
    changed = {name for name in after if after[name] != before.get(name)}
    assert {name for name in changed if "_pb2" not in name and not name.startswith("v1/")} == set(change)

    path = os.pathsep.join((str(folder), str(SUPPORT)))
    done = subprocess.run(
        [sys.executable, "-c", THE_COPY + program, str(package)],
        check=False, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    }
