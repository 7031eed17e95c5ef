"""The options of `octavo serve` that publish KV events over ZMQ."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..api.errors import InvalidConfig

if TYPE_CHECKING:
    from ..kv_events.zmq_publisher import KvEventOptions


def add_kv_event_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("KV events over ZMQ, for routers that read vLLM's").add_argument
    add("--kv-events-endpoint", metavar="ADDRESS",
        help="publish every change of the prefix cache: tcp://*:PORT and ipc://PATH are bound, "
        "tcp://HOST:PORT is connected to, as in vLLM (extra `zmq`; nowhere)")  # fmt: skip
    add("--kv-events-replay-endpoint", metavar="ADDRESS",
        help="bind a socket there that sends lost events again (nowhere)")  # fmt: skip
    add("--kv-events-topic", metavar="TEXT", default="",
        help="first frame of each event's message; llm-d expects kv@POD@MODEL (empty)")  # fmt: skip
    add("--kv-events-encoding", choices=("array", "map"), default="array",
        help="write an event as an array, like vLLM until 2026, or as a map, like vLLM since")  # fmt: skip


def kv_event_options(args: argparse.Namespace) -> KvEventOptions | None:
    """Return the destination of KV events, or None; InvalidConfig for a replay without one."""
    if args.kv_events_endpoint is None:
        if args.kv_events_replay_endpoint is not None:
            raise InvalidConfig(
                "--kv-events-replay-endpoint sends again what --kv-events-endpoint sent; give both of them"
            )
        return None
    from ..kv_events.zmq_publisher import KvEventOptions

    return KvEventOptions(
        endpoint=args.kv_events_endpoint,
        replay=args.kv_events_replay_endpoint,
        topic=args.kv_events_topic,
        encoding=args.kv_events_encoding,
    )
