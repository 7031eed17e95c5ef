"""TLS, client certificates and bearer tokens of a server.

Files are read at the start and by ``reload``. After an error in ``reload``, the old contents stay in use.
"""

from __future__ import annotations

import hashlib
import logging
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc

from ..api.address import Address
from ..api.errors import InvalidConfig, Unauthenticated
from .tenant_salts import TenantSalts

logger = logging.getLogger(__name__)

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # b64token of RFC 6750
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Caller(Protocol):
    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of a server. If ``ca`` is set, clients must show a certificate (mTLS)."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Read the files. Raises InvalidConfig if they are unusable."""
        cert, key = _read(self.cert, "--tls-cert"), _read(self.key, "--tls-key")
        ca = None if self.client_ca is None else _read(self.client_ca, "--tls-client-ca")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise InvalidConfig(
                f"--tls-cert {self.cert} and --tls-key {self.key} must be a PEM certificate and its "
                f"unencrypted key: {error}"
            ) from error
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise InvalidConfig(
                    f"--tls-client-ca {self.client_ca} must be PEM certificates: {error}"
                ) from error
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


class ReloadableTls:
    """TLS context of a port. Raises InvalidConfig if the files are unusable."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self.reload()
        if files.client_ca is not None:
            self.context.load_verify_locations(files.client_ca)
            self.context.verify_mode = ssl.CERT_REQUIRED

    def reload(self) -> None:
        """Read the files again for new connections. Raises InvalidConfig, and changes nothing, if they are
        unusable."""
        self._files.read()
        self.context.load_cert_chain(self._files.cert, self._files.key)


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"cannot read {flag} {path}: {error.strerror}") from error


def read_tokens(path: Path, flag: str = "--auth-token-file") -> dict[bytes, str]:
    """Return the tenant of each token; keys are SHA-256 digests of tokens.

    A line is TOKEN, TENANT TOKEN or TENANT:TOKEN. Empty lines and # comments are skipped. A token without
    a tenant is a tenant of its own. Raises InvalidConfig for an invalid line.
    """
    found: dict[bytes, str] = {}
    text = _read(path, flag).decode(errors="replace")
    for number, line in enumerate(text.splitlines(), 1):
        words = re.split(r"\s+|:\s*", line.strip())
        if words == [""] or line.lstrip().startswith("#"):
            continue
        token, tenant = words[-1], words[0] if len(words) == 2 else None
        if len(words) > 2 or not _TOKEN.fullmatch(token):
            raise InvalidConfig(
                f"line {number} of {flag} {path} must be TOKEN or TENANT TOKEN; a token has letters, digits "
                "and -._~+/, optionally with = at its end"
            )
        if tenant is not None and not _TENANT.fullmatch(tenant):
            raise InvalidConfig(
                f"line {number} of {flag} {path} must name a tenant of at most 64 letters, digits and ._-"
            )
        digest = hashlib.sha256(token.encode()).digest()
        if digest in found:
            raise InvalidConfig(f"line {number} of {flag} {path} repeats a token; remove one")
        found[digest] = tenant or f"token-{digest.hex()[:16]}"
    if not found:
        raise InvalidConfig(f"{flag} {path} must have at least one token, got none; add one")
    return found


def read_key(key: str) -> dict[bytes, str]:
    if not _TOKEN.fullmatch(key):
        raise InvalidConfig(
            "--api-key must be a token of letters, digits and -._~+/, optionally with = at its end"
        )
    digest = hashlib.sha256(key.encode()).digest()
    return {digest: f"token-{digest.hex()[:16]}"}


class Tokens:
    """Bearer tokens of a file and an API key, stored as SHA-256 digests."""

    def __init__(self, path: Path | None, key: str | None = None, *, flag: str = "--auth-token-file") -> None:
        self._path, self._flag = path, flag
        self._key = {} if key is None else read_key(key)
        self._tenants: Mapping[bytes, str] = {}
        self.reload()

    def reload(self) -> None:
        self._tenants = ({} if self._path is None else read_tokens(self._path, self._flag)) | self._key
        self.num_tenants = len(set(self._tenants.values()))

    def tenant_of(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
        """Return the tenant of a call's token. Raises Unauthenticated if it is missing or wrong."""
        given = [value for key, value in metadata or () if key == "authorization"]
        if len(given) != 1 or not isinstance(given[0], str):
            raise Unauthenticated(
                'a call must have a token, got none; send it as metadata, authorization: "Bearer TOKEN"'
            )
        scheme, _, token = given[0].partition(" ")
        digest = hashlib.sha256(token.strip().encode()).digest()
        found = self._tenants.get(digest)  # timing may reveal a digest, but not the token
        if scheme.lower() != "bearer" or found is None:
            raise Unauthenticated("the token is not valid on this server; ask the operator for a token")
        return found

    def accepts(self, authorization: str) -> bool:
        try:
            self.tenant_of([("authorization", authorization)])
        except Unauthenticated:
            return False
        return True


class Security:
    """TLS and bearer tokens of a server; both are optional."""

    def __init__(
        self,
        *,
        tls: TlsFiles | None = None,
        token_file: Path | None = None,
        api_key: str | None = None,
        salts: TenantSalts | None = None,
    ) -> None:
        self.tls = tls
        self.salts = salts or TenantSalts()
        self.tokens = None if token_file is None and api_key is None else Tokens(token_file, api_key)
        self._certificates = None if tls is None else tls.read()
        self._taken = self._certificates
        self._credentials: grpc.ServerCredentials | None = None

    def reload(self) -> None:
        """Read the files again, for new connections and calls."""
        try:
            certificates = None if self.tls is None else self.tls.read()
            if self.tokens is not None:
                self.tokens.reload()
        except InvalidConfig as error:
            logger.error("reloading failed, so the old certificates and tokens stay in use: %s", error)
            return
        self._certificates = certificates
        logger.info("certificates and tokens were reloaded")

    def credentials(self) -> grpc.ServerCredentials | None:
        if self.tls is None:
            return None
        assert self._certificates is not None
        self._taken = self._certificates
        self._credentials = grpc.dynamic_ssl_server_credentials(
            self._certificates,
            self._renewed,  # type: ignore[arg-type]  # grpc documents None, the stubs do not
            require_client_authentication=self.tls.client_ca is not None,
        )
        return self._credentials

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        current, taken = self._certificates, self._taken
        self._taken = current
        return None if current is taken else current

    def warn_of_strangers(self, address: Address) -> None:
        """Log a warning if other machines can use the server without a token."""
        checks_certificates = self.tls is not None and self.tls.client_ca is not None
        if self.tokens is None and not checks_certificates and not address.is_local:
            logger.warning(
                "anyone who can reach %s may use this server; to prevent it, give --auth-token-file or "
                "--tls-client-ca, or listen on 127.0.0.1",
                address,
            )

    def tenant_of(self, context: Caller) -> str:
        """Return the tenant of a call; "" on a server without tokens."""
        return "" if self.tokens is None else self.tokens.tenant_of(context.invocation_metadata())
