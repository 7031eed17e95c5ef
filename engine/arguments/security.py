from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.errors import InvalidConfig
from ..client.credentials import ClientCredentials

if TYPE_CHECKING:
    from ..grpc.security import TlsFiles


def add_security_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("security (SIGHUP makes the server read these files again)").add_argument
    add("--tls-cert", "--ssl-certfile", type=Path, metavar="F",
        help="PEM certificate chain of the server; gRPC and HTTP then accept only TLS")  # fmt: skip
    add("--tls-key", "--ssl-keyfile", type=Path, metavar="F",
        help="PEM private key of --tls-cert, not encrypted")  # fmt: skip
    add("--tls-client-ca", "--ssl-ca-certs", type=Path, metavar="F",
        help="PEM certificates of the authorities that sign the required client certificates")  # fmt: skip
    add("--auth-token-file", type=Path, metavar="F",
        help="file of bearer tokens that clients must send; each line is TOKEN or TENANT TOKEN")  # fmt: skip


def add_metrics_security_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "security of the metrics port (SIGHUP makes the server read these files again)"
    ).add_argument
    add("--metrics-tls-cert", type=Path, metavar="F", help="PEM certificate chain of the metrics port, "
        "which then accepts only HTTPS")  # fmt: skip
    add("--metrics-tls-key", type=Path, metavar="F", help="PEM private key of --metrics-tls-cert, not "
        "encrypted")  # fmt: skip
    add("--metrics-token-file", type=Path, metavar="F",
        help="file of bearer tokens for /metrics, one per line; /healthz and /readyz need none")  # fmt: skip


def metrics_tls_files(args: argparse.Namespace) -> TlsFiles | None:
    """Return the TLS files of the metrics port. Raises InvalidConfig if only one is given."""
    return _tls_files("metrics-", args.metrics_tls_cert, args.metrics_tls_key)


def tls_files(args: argparse.Namespace) -> TlsFiles | None:
    """Return the server's TLS files. Raises InvalidConfig if only some are given."""
    files = _tls_files("", args.tls_cert, args.tls_key, args.tls_client_ca)
    if files is None and args.tls_client_ca is not None:
        raise InvalidConfig("--tls-client-ca needs TLS; add --tls-cert and --tls-key")
    return files


def _tls_files(port: str, cert: Path | None, key: Path | None, ca: Path | None = None) -> TlsFiles | None:
    from ..grpc.security import TlsFiles

    if cert is not None and key is not None:
        return TlsFiles(cert=cert, key=key, client_ca=ca)
    if cert is not None or key is not None:
        raise InvalidConfig(f"--{port}tls-cert and --{port}tls-key belong together; give both or none")
    return None


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("connection (with --connect)").add_argument
    add("--tls", action="store_true", help="connect to the server over TLS")
    add("--tls-ca", type=Path, metavar="F", help="PEM certificates of authorities to trust; implies --tls")
    add("--tls-cert", type=Path, metavar="F", help="PEM certificate of this client; implies --tls")
    add("--tls-key", type=Path, metavar="F", help="PEM private key of --tls-cert")
    add("--auth-token-file", type=Path, metavar="F", help="file of tokens; each call sends the first token")


def credentials_of(args: argparse.Namespace) -> ClientCredentials:
    """Return the client's credentials. Raises InvalidConfig without --connect."""
    credentials = ClientCredentials(
        tls=args.tls, ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key, token_file=args.auth_token_file
    )
    if args.connect is None and credentials != ClientCredentials():
        raise InvalidConfig("TLS and token options need a server, got none; add --connect HOST:PORT")
    return credentials
