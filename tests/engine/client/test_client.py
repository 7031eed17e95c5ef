from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from octavo.engine.api.errors import EngineDead
from octavo.engine.client.client import Client

RESOLVING = "errors resolving there.invalid:5: [field:hostname lookup error:Domain name not found]"


@pytest.mark.parametrize(
    ("details", "said"),
    [
        (RESOLVING, "the host of there.invalid:5 cannot be resolved"),
        (
            "DNS resolution failed for there.invalid:5: timed out",
            "the host of there.invalid:5 cannot be resolved",
        ),
        ("failed to connect to all addresses; last error: refused", "no server answers at there.invalid:5"),
        ("TLS handshake failed", "check that --tls-ca"),
    ],
)
async def test_connection_errors_name_the_cause(details: str, said: str) -> None:
    async with Client("there.invalid:5") as client:
        error = client.translate(
            AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details, None)
        )
    assert isinstance(error, EngineDead)
    assert said in str(error)
