"""An OpenAI-compatible HTTP server: Octavo workers behind the SMG router.

    python deploy/router/serve_http.py --listen 127.0.0.1:30000 --workers 2 -- --kv-format fp4

Options after ``--`` are passed to ``octavo serve``. SIGTERM and SIGINT end the router, drain the workers,
and exit 0. Needs the extra ``router`` (the package ``smg``).
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from octavo.engine.api.address import check_free, parse_address
from octavo.engine.api.errors import EngineDead, InvalidConfig, OctavoError
from octavo.engine.arguments.usage import checked, positive, say_error
from octavo.engine.client.router_process import POLICIES, RouterProcess, find_router
from octavo.engine.client.server_process import ServerProcess


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
    find_router()
    check_free(args.listen, "--listen")
    check_free(args.router_metrics, "--router-metrics")
    stopping = asyncio.Event()
    for end in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(end, stopping.set)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(ServerProcess(worker_flags)) for _ in range(args.workers)]
        router = await stack.enter_async_context(
            RouterProcess(
                [address for worker in workers for _, address in _ports(worker)],
                listen=args.listen,
                metrics=args.router_metrics,
                policy=args.policy,
            )
        )
        model = workers[0].ready["model"]
        names = [name or model for name, _ in _ports(workers[0])]
        ready = asyncio.create_task(router.until_ready(names))
        ends: set[asyncio.Task[Any]] = {
            asyncio.create_task(router.wait()),
            asyncio.create_task(stopping.wait()),
        }
        await asyncio.wait({ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            print(
                f"octavo http ready: http={router.listen} model={model} router_metrics={router.metrics} "
                f"workers={_list(workers, 'grpc')} worker_metrics={_list(workers, 'metrics')}",
                flush=True,
            )
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in (ready, *ends):
            task.cancel()
        if not stopping.is_set():
            raise EngineDead(f"the router ended with {await router.wait()}; its words are above")
    return 0


def _ports(worker: ServerProcess) -> list[tuple[str, str]]:
    adapters = filter(None, worker.ready.get("adapters", "").split(","))
    return [
        ("", worker.ready["grpc"]),
        *((name, at) for name, _, at in (a.rpartition("=") for a in adapters)),
    ]


def _list(workers: Sequence[ServerProcess], key: str) -> str:
    return ",".join(worker.ready[key] for worker in workers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
