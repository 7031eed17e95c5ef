"""The options of `octavo serve` that concern HTTP."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..api.address import Address, parse_address
from ..api.errors import InvalidConfig
from ..arguments.usage import checked
from ..http.options import HttpOptions

DEFAULT = Address("127.0.0.1", 8000)
_ROUTER_LOG = {"critical": "error", "error": "error", "warning": "error", "info": "error", "debug": "info"}


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("HTTP (the OpenAI API, by the SMG router; extra `http`)").add_argument
    address = checked(parse_address)
    add(
        "--http",
        type=address,
        metavar="HOST:PORT",
        help="where HTTP listens; port 0 picks a free one (nowhere)",
    )
    add("--host", metavar="HOST", help=f"the host of --http by itself ({DEFAULT.host})")
    add("--port", type=_port, metavar="PORT", help=f"the port of --http by itself ({DEFAULT.port})")
    add("--api-key", type=_key, metavar="KEY",
        help="token that clients must send, over HTTP, or without --http over gRPC (none)")  # fmt: skip
    add("--ssl-certfile", type=Path, metavar="F", help="PEM certificate chain: HTTPS only")
    add("--ssl-keyfile", type=Path, metavar="F", help="PEM key of the certificate")
    add("--router-metrics", type=address, metavar="HOST:PORT", default="127.0.0.1:0",
        help="where the router's own metrics listen")  # fmt: skip


def _key(text: str) -> str:
    if not (text.isascii() and text.isprintable() and text) or " " in text:
        raise argparse.ArgumentTypeError("must be a token of printable ASCII characters without spaces")
    return text


def _said(parser: str | None) -> str | None:
    """The name of a parser that somebody gave, for the router."""
    return None if parser in (None, "auto", "none") else parser


def http_options(args: argparse.Namespace) -> HttpOptions | None:
    """How HTTP is served; None: it is not. InvalidConfig for what contradicts itself."""
    listen = _listen(args)
    if (args.ssl_certfile is None) != (args.ssl_keyfile is None):
        raise InvalidConfig("--ssl-certfile and --ssl-keyfile belong together; give both or none")
    if listen is None:
        if args.ssl_certfile is not None:
            raise InvalidConfig("--ssl-certfile is for HTTP, which is not served; give --http HOST:PORT too")
        return None
    if args.tls_cert is not None or args.auth_token_file is not None:
        flag = "--auth-token-file" if args.tls_cert is None else "--tls-cert"
        raise InvalidConfig(
            f"the router behind --http speaks to gRPC in plain text without tokens, {flag} wants other; use "
            "--api-key and --ssl-certfile for HTTP, or start two servers"
        )
    if args.api_key is not None and not args.listen.is_local:
        raise InvalidConfig(
            f"--api-key guards HTTP, and gRPC on {args.listen} would be open beside it; let --listen be on "
            "127.0.0.1, or leave --api-key out"
        )
    for flag, path in (("--ssl-certfile", args.ssl_certfile), ("--ssl-keyfile", args.ssl_keyfile)):
        if path is not None and not path.is_file():
            raise InvalidConfig(f"{flag} {path} is no file; give a PEM file")
    return HttpOptions(
        listen=listen,
        metrics=args.router_metrics,
        api_key=args.api_key,
        tls_cert=args.ssl_certfile,
        tls_key=args.ssl_keyfile,
        tool_call_parser=_said(args.tool_call_parser),
        reasoning_parser=_said(args.reasoning_parser),
        log_level=_ROUTER_LOG[args.log_level],
    )


def _listen(args: argparse.Namespace) -> Address | None:
    if args.host is None and args.port is None:
        listen: Address | None = args.http
        return listen
    if args.http is not None:
        raise InvalidConfig(f"--http {args.http} and --host or --port both say where HTTP listens; give one")
    return Address(args.host or DEFAULT.host, DEFAULT.port if args.port is None else args.port)


def _port(text: str) -> int:
    return checked(parse_address)(f"127.0.0.1:{text}").port
