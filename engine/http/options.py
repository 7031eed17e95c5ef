"""How the SMG router is told to serve HTTP, and where it may be reached."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..api.address import Address, check_free
from ..api.errors import InvalidConfig

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """What the HTTP router is told.

    listen     where HTTP listens
    metrics    where the router's own Prometheus metrics listen
    api_key    what clients must send as a bearer token; None: nothing
    tls_cert, tls_key   PEM files: HTTPS only
    tool_call_parser, reasoning_parser   of the router, where the model's name does not tell them
    log_level  of the router: debug, info, warn or error
    """

    listen: Address
    metrics: Address
    api_key: str | None = field(default=None, repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    log_level: str = "error"

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"


def check_installed() -> None:
    """InvalidConfig with the remedy if there is no router beside this Python."""
    if importlib.util.find_spec("smg") is None:
        raise InvalidConfig(
            "--http needs the router, which is not installed; run: pip install 'octavo[http]'"
        )


def with_real_port(address: Address, flag: str) -> Address:
    """The address with a free port in the place of 0; InvalidConfig if it is taken."""
    check_free(address, flag)
    if address.port:
        return address
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.create_server((address.host, 0), family=family) as probe:
        return address.with_port(probe.getsockname()[1])


def reachable(address: Address) -> Address:
    """Where this machine reaches what listens on ``address``, be that everywhere."""
    return Address(_EVERYWHERE.get(address.host, address.host), address.port)


def router_arguments(
    options: HttpOptions,
    worker: Address,
    *,
    model: str,
    aliases: Sequence[str],
    control_key: str,
    grace_s: float,
) -> list[str]:
    """The options of ``smg launch`` for one worker, reached in plain text at ``worker``.

    aliases      further names under which clients may ask for ``model``
    control_key  what the router's own API wants, which adds and removes workers: nobody is told it
    grace_s      how long running requests may finish after SIGTERM

    One worker needs no spreading, and its refusals are answers: another try would meet the same engine.
    """
    flags = {
        "--host": options.listen.host,
        "--port": options.listen.port,
        "--worker-urls": f"grpc://{reachable(worker)}",
        "--policy": "round_robin",
        "--prometheus-host": options.metrics.host,
        "--prometheus-port": options.metrics.port,
        "--log-level": options.log_level,
        "--shutdown-grace-period-secs": max(1, round(grace_s)),
        "--control-plane-api-keys": f"octavo:octavo:admin:{control_key}",
        "--api-key": options.api_key,
        "--tls-cert-path": options.tls_cert,
        "--tls-key-path": options.tls_key,
        "--tool-call-parser": options.tool_call_parser,
        "--reasoning-parser": options.reasoning_parser,
    }
    found = ["--disable-retries", "--disable-circuit-breaker"]
    for flag, value in flags.items():
        found += [] if value is None else [flag, str(value)]
    for alias in aliases:
        found += ["--model-alias", f"{alias}={model}"]
    return found
