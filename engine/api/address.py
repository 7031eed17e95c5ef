"""TCP addresses in the form "HOST:PORT". Port 0 means any free port."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import InvalidConfig

EVERYWHERE = {"0.0.0.0", "::", ""}


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        return self.host == "localhost" or self.host.startswith("127.") or self.host == "::1"

    def clashes_with(self, other: Address) -> bool:
        hosts = {self.host, other.host}
        return bool(self.port) and self.port == other.port and (len(hosts) == 1 or bool(hosts & EVERYWHERE))

    def with_port(self, port: int) -> Address:
        return Address(self.host, port)


def parse_address(text: str) -> Address:
    """Parse "HOST:PORT" or "[IPv6]:PORT". Raises InvalidConfig for other text."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidConfig(f"address {text!r} has several colons; put an IPv6 host in brackets: [::1]:50051")
    if not colon or not host:
        raise InvalidConfig(f"address must be HOST:PORT, got {text!r}; for example 127.0.0.1:50051")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise InvalidConfig(f"port must be a number between 0 and 65535, got {port!r}; 0 picks a free port")
    return Address(host, int(port))


def port_in_use(address: Address, flag: str) -> InvalidConfig:
    return InvalidConfig(
        f"cannot listen on {address}: the port is in use, or the host is not an address of this machine; "
        f"choose another {flag}, or port 0 for a free port"
    )


def check_distinct(addresses: Mapping[str, Address | None]) -> None:
    """Raise InvalidConfig if two options name the same port."""
    for (flag, one), (other_flag, other) in itertools.combinations(addresses.items(), 2):
        if one is not None and other is not None and one.clashes_with(other):
            raise InvalidConfig(
                f"{flag} {one} and {other_flag} {other} name the same port; choose different ports"
            )


def bound_socket(address: Address, flag: str) -> socket.socket:
    """Return a TCP socket bound to ``address``. Raises InvalidConfig if binding fails."""
    bound = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address.host, address.port))
    except OSError as error:
        bound.close()
        raise port_in_use(address, flag) from error
    return bound


def check_free(address: Address, flag: str) -> None:
    bound_socket(address, flag).close()
