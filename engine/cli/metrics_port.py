"""Security of the metrics port: TLS files and tokens for an HTTP server."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING

from ..api.errors import InvalidConfig, Unauthenticated

if TYPE_CHECKING:
    from pathlib import Path

    from ..grpc.security import TlsFiles

logger = logging.getLogger(__name__)


class MetricsSecurity:
    """TLS and tokens; either may be None. Raises InvalidConfig for unusable files."""

    def __init__(self, tls: TlsFiles | None, token_file: Path | None) -> None:
        from ..grpc.security import Tokens

        self._files = tls
        self.context: ssl.SSLContext | None = None
        if tls is not None:
            tls.read()  # raises with the reason
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(tls.cert, tls.key)
        self._tokens = None if token_file is None else Tokens(token_file, flag="--metrics-token-file")

    @property
    def has_files(self) -> bool:
        return self._files is not None or self._tokens is not None

    def may_read(self, authorization: str) -> bool:
        """Whether this header has a valid token, or no token is required."""
        if self._tokens is None:
            return True
        try:
            self._tokens.tenant_of([("authorization", authorization)])
        except Unauthenticated:
            return False
        return True

    def reload(self) -> None:
        """Read the files again, for new connections and requests. A damaged file changes nothing."""
        try:
            if self._files is not None and self.context is not None:
                self._files.read()
                self.context.load_cert_chain(self._files.cert, self._files.key)
            if self._tokens is not None:
                self._tokens.reload()
        except InvalidConfig as error:
            logger.error(
                "metrics port: reloading failed, the old certificates and tokens stay in use: %s", error
            )
