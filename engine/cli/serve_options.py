from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api.address import Address, check_distinct, parse_address
from ..api.errors import InvalidConfig
from ..api.size import parse_size
from ..arguments.options import add_engine_arguments, add_log_level_argument
from ..arguments.security import (
    add_metrics_security_arguments,
    add_security_arguments,
    metrics_tls_files,
    tls_files,
)
from ..arguments.sources import CONFIG_FLAG
from ..arguments.usage import Parser, above_zero, checked, seconds

if TYPE_CHECKING:
    from ..grpc.security import TlsFiles
    from ..kv_events.zmq_publisher import KvEventOptions

MODEL = "model_to_serve"
MAX_MESSAGE_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of ``octavo serve`` that are not engine settings. Sizes are in bytes, times in seconds."""

    listen: Address
    metrics: Address | None
    drain_timeout: float
    reflection: bool = True
    max_message_size: int | None = None
    write_timeout: float = 30.0
    engine_process: bool = False
    vllm_metrics: bool = False
    otlp_traces_endpoint: str | None = None
    otlp_metrics_endpoint: str | None = None
    tls: TlsFiles | None = None
    auth_token_file: Path | None = None
    metrics_tls: TlsFiles | None = None
    metrics_token_file: Path | None = None
    api_key: str | None = field(default=None, repr=False)
    http: Address | None = None
    allowed_origins: tuple[str, ...] = ()
    kv_events: KvEventOptions | None = None
    lora_listen: Mapping[str, Address] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    if isinstance(parser, Parser):
        parser.read_sources()
    parser.add_argument(
        MODEL, nargs="?", action=_Model, default=argparse.SUPPRESS, metavar="MODEL",
        help="model to serve, instead of --model",
    )  # fmt: skip
    parser.add_argument(CONFIG_FLAG, type=Path, metavar="FILE", help="TOML file with options of this command")
    parser.add_argument("--listen", type=checked(parse_address), metavar="HOST:PORT",
        default="127.0.0.1:50051",
        help="address on which gRPC listens; port 0 picks a free port")  # fmt: skip
    parser.add_argument("--metrics", type=checked(_metrics_address), metavar="HOST:PORT|off",
        default="127.0.0.1:9400",
        help="HTTP address for /metrics, /healthz and /readyz; off turns it off")  # fmt: skip
    parser.add_argument("--vllm-metrics", action="store_true", help="also export metrics under vLLM's names, "
        "for vLLM dashboards and for inference gateways such as llm-d")  # fmt: skip
    parser.add_argument("--otlp-traces-endpoint", metavar="URL",
        help="OTLP endpoint (gRPC) for one trace span per request; needs the extra `tracing` (default: "
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT)")  # fmt: skip
    parser.add_argument("--otlp-metrics-endpoint", metavar="URL",
        help="OTLP endpoint (gRPC) for OpenTelemetry's gen_ai.server metrics; needs the extra `tracing` "
        "(default: OTEL_EXPORTER_OTLP_METRICS_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT)")  # fmt: skip
    parser.add_argument("--engine-process", action="store_true",
        help="run the engine in a process of its own, separate from network and tokenization")  # fmt: skip
    parser.add_argument("--drain-timeout", type=seconds, metavar="SECONDS", default=30.0,
        help="time allowed for running requests to finish after SIGTERM")  # fmt: skip
    parser.add_argument("--no-reflection", dest="reflection", action="store_false",
        help="turn off gRPC server reflection, which describes services and messages to clients")  # fmt: skip
    parser.add_argument("--max-message-size", type=checked(_message_size), metavar="SIZE",
        help="maximum size of a gRPC message to accept (default: 1MiB plus 8 bytes per token of the model's "
        "length)")  # fmt: skip
    parser.add_argument("--write-timeout", type=above_zero, metavar="SECONDS", default=30.0,
        help="time after which a gRPC call ends if its client has not read the output")  # fmt: skip
    parser.add_argument("--lora-listen", type=checked(_adapter_address), nargs="+", action="extend",
        default=[], metavar="NAME=HOST:PORT", help="for routers: also serve vLLM's gRPC API at HOST:PORT, "
        "with the LoRA adapter NAME as its model; the adapter may be loaded later")  # fmt: skip
    add_http_arguments(parser)
    add_kv_event_arguments(parser)
    add_security_arguments(parser)
    add_metrics_security_arguments(parser)
    add_log_level_argument(parser, "info")
    add_engine_arguments(parser)


class _Model(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _option: Any = None
    ) -> None:
        setattr(namespace, MODEL, values)
        if namespace.model is None or "--model" in getattr(parser, "origins", {}):
            namespace.model = values


def _check_one_model(args: argparse.Namespace) -> None:
    named = getattr(args, MODEL, None)
    if named not in (None, args.model):
        raise InvalidConfig(f"MODEL {named} and --model {args.model} exclude each other; give one of them")
    if args.model is None and (names := getattr(args, "after_one_option", None)):
        raise InvalidConfig(
            f"--served-model-name takes every word after it as a name, here {' '.join(names)}; put MODEL "
            "before it, or use --model"
        )


def _message_size(text: str) -> int:
    if (size := parse_size(text)) > MAX_MESSAGE_SIZE:
        raise InvalidConfig(f"must be at most {MAX_MESSAGE_SIZE} bytes, the limit of gRPC, got {text!r}")
    return size


def _metrics_address(text: str) -> Address | None:
    return None if text == "off" else parse_address(text)


def _adapter_address(text: str) -> tuple[str, Address]:
    name, _, address = text.rpartition("=")
    if not name.isprintable() or not name or set(" ,") & set(name):
        raise InvalidConfig(
            f"must be NAME=HOST:PORT with a name without spaces and commas, got {text!r}; write "
            "french=127.0.0.1:50052"
        )
    return name, parse_address(address)


def serve_options(args: argparse.Namespace) -> ServeOptions:
    _check_one_model(args)
    http = http_address(args)
    flags = {f"--lora-listen {name}": address for name, address in args.lora_listen}
    if len(flags) < len(args.lora_listen):
        raise InvalidConfig(f"--lora-listen must name different adapters, got {' '.join(flags)}; drop one")
    check_distinct({"--listen": args.listen, "--metrics": args.metrics, "--http": http, **flags})
    converted: dict[str, Any] = {
        "tls": tls_files(args),
        "metrics_tls": metrics_tls_files(args),
        "http": http,
        "allowed_origins": tuple(args.allowed_origins),
        "kv_events": kv_event_options(args),
        "lora_listen": dict(args.lora_listen),
    }
    names = {each.name for each in fields(ServeOptions)} - converted.keys()
    return ServeOptions(**converted, **{name: getattr(args, name) for name in names})


DEFAULT = Address("127.0.0.1", 8000)


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("HTTP (the OpenAI API)").add_argument
    add("--http", type=checked(parse_address), metavar="HOST:PORT",
        help="address on which the HTTP APIs listen; port 0 picks a free port (default: off)")  # fmt: skip
    add("--host", metavar="HOST", help=f"host of the HTTP APIs, with --port (default: {DEFAULT.host})")
    add("--port", type=_port, metavar="PORT",
        help=f"port of the HTTP APIs, instead of --http (default: {DEFAULT.port})")  # fmt: skip
    add("--api-key", type=_key, metavar="KEY", help="bearer token that clients must send; tokens of "
        "--auth-token-file are also accepted (default: none)")  # fmt: skip
    add("--allowed-origins", type=_origin, nargs="+", default=[], metavar="ORIGIN",
        help="origins of web pages that may call this server from a browser, such as http://localhost:3000; "
        "* allows all (default: none)")  # fmt: skip


def _key(text: str) -> str:
    if not (text.isascii() and text.isprintable() and text) or " " in text:
        raise argparse.ArgumentTypeError("must be a token of printable ASCII characters without spaces")
    return text


def _origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"must be * or SCHEME://HOST:PORT without a path, got {text!r:.60}")
    return text


def http_address(args: argparse.Namespace) -> Address | None:
    """Return the HTTP address, or None. Raises InvalidConfig if it is given twice."""
    if args.host is None and args.port is None:
        listen: Address | None = args.http
        return listen
    if args.http is not None:
        raise InvalidConfig(f"--http {args.http} must not come with --host or --port; drop --http or these")
    return Address(args.host or DEFAULT.host, DEFAULT.port if args.port is None else args.port)


def _port(text: str) -> int:
    return checked(parse_address)(f"127.0.0.1:{text}").port


def add_kv_event_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("KV events over ZMQ, in vLLM's format, for routers").add_argument
    add("--kv-events-endpoint", metavar="ADDRESS", help="ZMQ address to which changes of the prefix cache "
        "are published; as in vLLM, the server binds tcp://*:PORT and ipc://PATH, and connects to "
        "tcp://HOST:PORT; needs the extra `zmq` (default: none)")  # fmt: skip
    add("--kv-events-replay-endpoint", metavar="ADDRESS",
        help="ZMQ address at which readers request events that they missed (default: none)")  # fmt: skip
    add("--kv-events-topic", metavar="TEXT", default="", help="ZMQ topic, which is the first frame of each "
        "message; llm-d expects kv@POD@MODEL (default: empty)")  # fmt: skip
    add("--kv-events-encoding", choices=("array", "map"), default="array",
        help="encoding of an event: array as in vLLM before 2026, or map as in vLLM since then")  # fmt: skip


def kv_event_options(args: argparse.Namespace) -> KvEventOptions | None:
    if args.kv_events_endpoint is None:
        if args.kv_events_replay_endpoint is not None:
            raise InvalidConfig(
                "--kv-events-replay-endpoint repeats events of --kv-events-endpoint; give both options"
            )
        return None
    from ..kv_events.zmq_publisher import KvEventOptions

    return KvEventOptions(
        endpoint=args.kv_events_endpoint,
        replay=args.kv_events_replay_endpoint,
        topic=args.kv_events_topic,
        encoding=args.kv_events_encoding,
    )
