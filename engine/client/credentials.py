from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.errors import InvalidConfig

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCredentials:
    """PEM files and a token file of a client. ``ca`` is None for gRPC's default authorities."""

    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidConfig("--tls-cert and --tls-key belong together; give both or none")

    @property
    def uses_tls(self) -> bool:
        return self.tls or self.ca is not None or self.cert is not None

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return gRPC credentials, or None for plain text. Raises InvalidConfig for an unreadable file."""
        if not self.uses_tls:
            return None
        import grpc

        options = {"--tls-ca": self.ca, "--tls-key": self.key, "--tls-cert": self.cert}
        files = [None if path is None else _read_pem(path, option) for option, path in options.items()]
        return grpc.ssl_channel_credentials(*files)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        if self.token_file is None:
            return ()
        lines = _read(self.token_file, "--auth-token-file").decode(errors="replace").splitlines()
        words = [line.replace(":", " ").split() for line in lines if not line.lstrip().startswith("#")]
        token = next((found[-1] for found in words if found), None)
        if token is None:
            raise InvalidConfig(f"--auth-token-file {self.token_file} has no token; write one into it")
        return (("authorization", f"Bearer {token}"),)


def _read_pem(path: Path, option: str) -> bytes:
    content = _read(path, option)
    if b"-----BEGIN " not in content:
        raise InvalidConfig(f"{option} {path} must be a PEM file; give one that begins with -----BEGIN")
    return content


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(
            f"{option} {path} cannot be read: {error.strerror}; give a file that this user may read"
        ) from error
