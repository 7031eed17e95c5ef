"""The options of `octavo serve` that concern HTTP."""

from __future__ import annotations

import argparse
import re

from ..api.address import Address, parse_address
from ..api.errors import InvalidConfig
from ..arguments.usage import checked

DEFAULT = Address("127.0.0.1", 8000)


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("HTTP (the OpenAI API)").add_argument
    add("--http", type=checked(parse_address), metavar="HOST:PORT",
        help="address on which the HTTP APIs listen; port 0 picks a free port (off)")  # fmt: skip
    add("--host", metavar="HOST", help=f"host for HTTP, instead of --http HOST:PORT ({DEFAULT.host})")
    add("--port", type=_port, metavar="PORT", help="port for HTTP, instead of --http HOST:PORT "
        f"({DEFAULT.port})")  # fmt: skip
    add("--api-key", type=_key, metavar="KEY",
        help="bearer token that clients must send, or one of --auth-token-file (none)")  # fmt: skip
    add("--allowed-origins", type=_origin, nargs="+", default=[], metavar="ORIGIN",
        help="origins whose pages may ask from a browser, such as http://localhost:3000; * allows all pages "
        "(none)")  # fmt: skip


def _key(text: str) -> str:
    if not (text.isascii() and text.isprintable() and text) or " " in text:
        raise argparse.ArgumentTypeError("must be a token of printable ASCII characters without spaces")
    return text


def _origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"must be * or SCHEME://HOST:PORT without a path, got {text!r:.60}")
    return text


def http_address(args: argparse.Namespace) -> Address | None:
    """Return the address of HTTP; None: no HTTP. Raises InvalidConfig if it is given twice."""
    if args.host is None and args.port is None:
        listen: Address | None = args.http
        return listen
    if args.http is not None:
        raise InvalidConfig(f"--http {args.http} must not come with --host or --port; give one or the other")
    return Address(args.host or DEFAULT.host, DEFAULT.port if args.port is None else args.port)


def _port(text: str) -> int:
    return checked(parse_address)(f"127.0.0.1:{text}").port
