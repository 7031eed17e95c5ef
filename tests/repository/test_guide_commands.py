"""Every console command of the documents runs.

Addresses become free ports, checkpoints become the demo model, placeholders become real values."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / "docs" / name for name in ("quick-start.md", "http-api.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
PORTS = {"8000": "http", "50051": "grpc", "9400": "metrics"}
ELSEWHERE = ("pip ", "make ", "python3 -m venv ")  # CI runs these
FEW = "--lengths 64 --documents 1 --formats int8"
PLACEHOLDERS = {
    r"(?<=serve )(?!demo)\S+": "demo",
    r"\bFOLDER\b": "demo",
    r"(?<=--policy )NAME\b": "lru",
    r"--batch 1,8$": "--batch 1 --prompt-tokens 32 --output-tokens 4",
    r"(?<=--iters )\d+": "4",
    r" --compare$": "",  # 46 s of synthetic traffic; tests/lab/cache_sim runs it
    r"(?<=--text )FILE --model MODEL .*": f"{ROOT / 'README.md'} --model demo {FEW}",
}
BIN = Path(sys.executable).parent
OCTAVO = BIN / "octavo"


def commands(text: str) -> Iterator[str]:
    for block in re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines: list[str] = []
            for line in part.splitlines():
                lines.append(line)
                whole = "\n".join(lines)
                if not line.endswith("\\") and whole.count("'") % 2 == 0:
                    break
            yield "\n".join(lines)


class Shell:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, str] = {}
        self._variables = ""
        (folder / "data").mkdir()
        for name in ("train", "valid"):
            (folder / "data" / f"{name}.jsonl").write_text('{"text": "Once there was a pirate."}\n' * 4)
        (folder / "tokens").write_text("alice secret-of-alice\nbatch secret-of-batch\n")
        (folder / "tokens").chmod(0o600)
        trace = (ROOT / "tests" / "data" / "conversation_trace_500.jsonl").read_text().splitlines()[:20]
        (folder / "TRACE.jsonl").write_text("\n".join(trace))

    def run(self, command: str) -> None:
        for pattern, value in PLACEHOLDERS.items():
            command = re.sub(pattern, value, command)
        if command.startswith("octavo serve"):
            self._serve(command)
            return
        if re.match(r"[A-Z]+=", command):
            self._variables += f"{command}\n"
            return
        if "127.0.0.1:" in command and self._server is None:
            self._serve("octavo serve demo --http 127.0.0.1:8000")
        for port, name in PORTS.items():
            command = command.replace(f"127.0.0.1:{port}", self._ports.get(name, ""))
        command = (
            re.sub(r"(?<=explain )ID\b", self._request_id(), command) if "explain ID" in command else command
        )
        command = re.sub(r"^curl ", "curl --fail-with-body ", command)
        done = subprocess.run(
            ["bash", "-c", self._variables + command],
            cwd=self._folder,
            env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-1000:]}"
        assert done.stdout.strip(), f"{command} printed nothing"

    def _serve(self, command: str) -> None:
        self.stop()
        words = [str(OCTAVO), *re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:0", command).split()[1:]]
        for option in ("--listen", "--metrics", "--http"):
            words += [option, "127.0.0.1:0"]
        log = self._folder / "log"
        with log.open("w") as file:
            self._server = subprocess.Popen(words, cwd=self._folder, stdout=file, stderr=subprocess.STDOUT)
        while "octavo ready:" not in log.read_text():
            assert self._server.poll() is None, f"{command} ended: {log.read_text()[-2000:]}"
            time.sleep(0.1)
        self._ports = dict(re.findall(r"(grpc|http|metrics)=(\S+)", log.read_text()))

    def _request_id(self) -> str:
        address = self._ports["http"]
        body = '{"model": "demo", "prompt": "Once", "max_tokens": 1}'
        done = subprocess.run(
            [
                "curl", "-s", "-i", f"http://{address}/v1/completions", "-H",
                "content-type: application/json", "-d", body,
            ],
            capture_output=True,
            text=True,
            check=True,
        )  # fmt: skip
        found = re.search(r'"id": ?"([^"]+)"', done.stdout)
        assert found is not None, done.stdout
        return found.group(1)

    def stop(self) -> None:
        if self._server is not None:
            self._server.terminate()
            try:
                assert self._server.wait(timeout=60) == 0
            finally:
                self._server.kill()
                self._server = None


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    ours = [command for command in commands(page.read_text()) if not command.startswith(ELSEWHERE)]
    if not ours:
        pytest.skip("this page has no command of its own")
    shell = Shell(tmp_path)
    try:
        for command in ours:
            shell.run(command)
    finally:
        shell.stop()


def test_a_command_is_read_with_its_further_lines() -> None:
    text = "```console\n$ curl a \\\n    -d '{\n  1}'\n{answer}\n$ octavo doctor\nok\n```\n"
    assert list(commands(text)) == ["curl a \\\n    -d '{\n  1}'", "octavo doctor"]
