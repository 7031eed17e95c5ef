"""An OpenAI-compatible HTTP server: Octavo workers behind the SMG router.

    python deploy/router/serve_http.py --listen 127.0.0.1:30000 --workers 2 -- --kv-format fp4

Options after ``--`` are passed to ``octavo serve``. SIGTERM and SIGINT end the router, drain the workers,
and exit 0. Needs the extra ``http`` (the package ``smg``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from octavo.engine.api.address import Address, check_free, parse_address
from octavo.engine.api.errors import EngineDead, InvalidConfig, OctavoError
from octavo.engine.arguments.usage import checked, positive, say_error
from octavo.engine.client.server_process import ServerProcess

READY_TIMEOUT_S = 120.0
POLICIES = ("cache_aware", "round_robin", "random", "power_of_two", "least_load", "prefix_hash")


def main(argv: Sequence[str]) -> int:
    own, worker_flags = _split(argv)
    args = _parser().parse_args(own)
    try:
        return asyncio.run(serve(args, worker_flags))
    except OctavoError as error:
        say_error("serve-http", error)
        return 2 if isinstance(error, InvalidConfig) else 1


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Octavo workers behind the SMG router. Options after -- go to `octavo serve`.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    address = checked(parse_address)
    parser.add_argument("--listen", type=address, default="127.0.0.1:30000", help="where HTTP listens")
    parser.add_argument("--workers", type=positive, default=1, help="servers behind the router")
    parser.add_argument("--policy", choices=POLICIES, default="cache_aware", help="how requests are spread")
    parser.add_argument(
        "--router-metrics", type=address, default="127.0.0.1:29000", help="Prometheus metrics of the router"
    )
    return parser


async def serve(args: argparse.Namespace, worker_flags: Sequence[str]) -> int:
    """Serve until a signal arrives; return 0. Raises EngineDead if the router ends by itself."""
    smg = find_router()
    listen, metrics = (
        _real_port(args.listen, "--listen"),
        _real_port(args.router_metrics, "--router-metrics"),
    )
    stopping = asyncio.Event()
    for end in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(end, stopping.set)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(ServerProcess(worker_flags)) for _ in range(args.workers)]
        router = await asyncio.create_subprocess_exec(
            smg, "launch", "--host", listen.host, "--port", str(listen.port),
            "--prometheus-host", metrics.host, "--prometheus-port", str(metrics.port),
            "--policy", args.policy, "--log-level", "warn", "--shutdown-grace-period-secs", "20",
            "--worker-urls", *(f"grpc://{address}" for worker in workers for _, address in _ports(worker)),
            stdout=sys.stderr.fileno(),
            start_new_session=True,
        )  # fmt: skip
        stack.push_async_callback(_end, router)
        model = workers[0].ready["model"]
        names = [name or model for name, _ in _ports(workers[0])]
        ready = asyncio.create_task(_until_ready(listen, names))
        ends: set[asyncio.Task[Any]] = {
            asyncio.create_task(router.wait()),
            asyncio.create_task(stopping.wait()),
        }
        await asyncio.wait({ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            print(
                f"octavo http ready: http={listen} model={model} router_metrics={metrics} "
                f"workers={_list(workers, 'grpc')} worker_metrics={_list(workers, 'metrics')}",
                flush=True,
            )
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in (ready, *ends):
            task.cancel()
        if not stopping.is_set():
            raise EngineDead(f"the router ended with {router.returncode}; its words are above")
    return 0


def _ports(worker: ServerProcess) -> list[tuple[str, str]]:
    adapters = filter(None, worker.ready.get("adapters", "").split(","))
    return [
        ("", worker.ready["grpc"]),
        *((name, at) for name, _, at in (a.rpartition("=") for a in adapters)),
    ]


def _list(workers: Sequence[ServerProcess], key: str) -> str:
    return ",".join(worker.ready[key] for worker in workers)


def find_router() -> str:
    """Return the path of ``smg``, next to this Python or on the PATH; InvalidConfig if there is none."""
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join((beside, os.environ.get("PATH", "")))
    if (found := shutil.which("smg", path=path)) is None:
        raise InvalidConfig("the router is not installed; run in a checkout: pip install '.[router]'")
    return found


def _real_port(address: Address, flag: str) -> Address:
    check_free(address, flag)
    if address.port:
        return address
    with socket.create_server((address.host, 0)) as probe:
        return address.with_port(probe.getsockname()[1])


async def _until_ready(listen: Address, names: Sequence[str]) -> None:
    for _ in range(round(READY_TIMEOUT_S / 0.1)):
        with contextlib.suppress(OSError, ValueError):
            models = await asyncio.to_thread(_get_json, f"http://{listen}/v1/models")
            tokenizers = await asyncio.to_thread(_get_json, f"http://{listen}/v1/tokenizers")
            if all(repr(name) in str(models) and repr(name) in str(tokenizers) for name in names):
                return
        await asyncio.sleep(0.1)
    raise EngineDead(f"the router did not find its workers within {READY_TIMEOUT_S:g} s")


def _get_json(url: str) -> object:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=5) as reply:
        return json.load(reply)


async def _end(process: asyncio.subprocess.Process) -> None:
    for end, patience in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(end)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience)
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
