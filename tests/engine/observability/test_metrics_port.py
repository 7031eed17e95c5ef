from __future__ import annotations

import asyncio
import signal
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import trustme

from octavo.engine.cli import main
from octavo.engine.client.server_process import ServerProcess
from served import eventually_async

pytestmark = pytest.mark.server

SMALL = ["--num-pages", "16", "--max-running", "4", "--max-step-tokens", "32"]


def _status(url: str, context: ssl.SSLContext | None, token: str | None = None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=20, context=context) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


async def test_metrics_need_tls_and_a_token_and_probes_need_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key, tokens = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "tokens"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    tokens.write_text("prometheus one\n")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    flags = [
        "--metrics-tls-cert",
        str(cert),
        "--metrics-tls-key",
        str(key),
        "--metrics-token-file",
        str(tokens),
    ]
    async with ServerProcess([*SMALL, *flags]) as server:
        base = f"https://{server.ready['metrics']}"

        async def status(path: str, token: str | None = None) -> int:
            return await asyncio.to_thread(_status, base + path, context, token)

        assert await status("/metrics") == 401
        assert await status("/metrics", "two") == 401
        assert await status("/metrics", "one") == 200
        assert (await status("/healthz"), await status("/readyz")) == (200, 200)
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            await asyncio.to_thread(_status, f"http://{server.ready['metrics']}/metrics", None)
        tokens.write_text("two\n")
        server.signal(signal.SIGHUP)

        async def is_renewed() -> bool:
            return await status("/metrics", "two") == 200

        await eventually_async(is_renewed, "SIGHUP reads the tokens again")
        assert await status("/metrics", "one") == 401


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--metrics-tls-cert", "x"], "--metrics-tls-key"),
        (["--metrics-token-file", "/nowhere"], "--metrics-token-file"),
    ],
)
def test_unusable_options_print_one_line(
    flags: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", *flags]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1, err
    assert hint in err
