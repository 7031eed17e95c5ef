from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fakes import FakeCore, small_config
from octavo.engine import AsyncEngine, SamplingParams
from octavo.engine.api.errors import EngineDead, InvalidConfig
from octavo.engine.cli.serve import HANG_S, ServerProbes
from octavo.engine.client.client import Client
from octavo.engine.client.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[3]


def python(code: str, *, before: str = "") -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f'{before} exec "$0" -c "$1"', sys.executable, code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_all_descriptors_are_used_that_are_allowed() -> None:
    code = (
        "import resource; from octavo.engine.cli.serve_limits import raise_descriptor_limit as r; r(); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = python(code, before="ulimit -Sn 200; ulimit -Hn 500;")
    assert done.stdout.split() == ["500", "500"], done.stderr


def test_a_process_that_does_not_end_is_ended_and_reports_it() -> None:
    code = (
        "import threading, time; from octavo.engine.cli.serve_limits import ExitDeadline\n"
        "ExitDeadline().start(0.3, 7)\n"
        "threading.Thread(target=time.sleep, args=(100,)).start()"
    )
    done = python(code)
    assert done.returncode == 7
    assert "still running 0.3 s after the signal" in done.stderr


def test_a_process_whose_interpreter_is_kept_is_ended_too() -> None:
    code = (
        "import ctypes, sys; from octavo.engine.cli.serve_limits import ExitDeadline\n"
        "ExitDeadline().start(1.0, 7)\n"
        "ctypes.PyDLL(None).sleep(100)"  # holds the GIL
    )
    done = python(code)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


def test_sigterm_ends_a_server_that_is_only_starting() -> None:
    """Without a handler, the first process of a container ignores SIGTERM."""
    command = [
        sys.executable, "-m", "octavo.engine.cli", "serve", "--listen", "127.0.0.1:0", "--metrics", "off",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        status = Path(f"/proc/{process.pid}/status")
        if not status.exists():
            process.kill()
            pytest.skip("which signals a process handles is told by Linux only")
        end = time.monotonic() + 60
        while not _handles(status, signal.SIGTERM):
            assert time.monotonic() < end
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def _handles(status: Path, number: signal.Signals) -> bool:
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


async def test_streams_fail_before_the_disk_is_closed() -> None:
    def explode() -> None:
        raise MemoryError("device lost")

    fake, closing, go = FakeCore(before_step=explode), threading.Event(), threading.Event()
    engine = AsyncEngine(small_config(), core_factory=fake)
    await engine.start()
    core = fake.core
    assert core is not None
    close = core.close

    def slow() -> None:
        closing.set()
        assert go.wait(30)
        close()

    core.close = slow  # type: ignore[method-assign]
    try:
        with pytest.raises(EngineDead, match="device lost"):
            async for _ in engine.generate([1, 2], SamplingParams()):
                pass
        assert await asyncio.to_thread(closing.wait, 30)
        assert engine.dead_error is not None
        with pytest.raises(EngineDead):
            await anext(engine.generate([1, 2], SamplingParams()))
    finally:
        go.set()
        await engine.stop()


def test_a_step_that_hangs_fails_the_liveness_probe() -> None:
    engine = SimpleNamespace(dead_error=None, step_seconds=lambda: HANG_S - 1)
    probes = ServerProbes(engine)  # type: ignore[arg-type]
    assert probes.alive() is None
    engine.step_seconds = lambda: HANG_S + 1
    assert "current step has taken 121 s" in (probes.alive() or "")


def test_sigterm_ends_a_server_before_it_has_read_its_options() -> None:
    code = (
        "import os, signal, octavo.engine.cli as cli\n"
        "cli._parser = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
        "cli.main(['serve'])"
    )
    assert python(code).returncode == 0


@pytest.mark.parametrize("first", [False, True])
def test_sigterm_while_python_starts_is_not_lost_in_the_image(first: bool) -> None:
    docker = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    *launcher, program = json.loads(re.findall(r"^ENTRYPOINT (.+octavo.+)$", docker, flags=re.MULTILINE)[0])
    assert program == "octavo"
    if first:
        launcher = ["unshare", "--user", "--map-root-user", "--pid", "--fork", *launcher]
    try:
        subprocess.run([*launcher, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"{launcher[0]} cannot do that here")
    code = (
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n"
        "import octavo.engine.cli as cli\n"
        "cli._parser = lambda: print('served')\n"
        "cli.main(['serve'])"
    )
    done = subprocess.run(
        [*launcher, sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


async def test_a_collector_that_never_answers_does_not_keep_a_server() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs the extra `tracing`")
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        flags = ["--otlp-traces-endpoint", url, "--otlp-metrics-endpoint", url, "--drain-timeout", "1"]
        server = ServerProcess(["--model", "demo", "--num-pages", "64", *flags], stop_timeout=60)
        await server.start()
        async with Client(server.ready["grpc"]) as client:
            assert [delta async for delta in client.generate("a", SamplingParams(max_tokens=2))]
        assert await server.stop() == 0


def test_memory_for_swapping_must_be_there() -> None:
    config = small_config(swap_memory=100 << 40)
    with pytest.raises(InvalidConfig, match="swap_memory must be at most"):
        FakeCore()(config)
