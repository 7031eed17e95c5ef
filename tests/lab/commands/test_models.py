from __future__ import annotations

import json

import pytest

from octavo.engine.cli import main

TRIED = ("llama", "deepseek_v3", "prism_hadamard_qwen35")


def test_some_are_examined(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", *TRIED, "--json"]) == 0
    found = {
        one["architecture"]: one
        for one in json.loads(capsys.readouterr().out.splitlines()[-1])["architectures"]
    }
    assert list(found) == list(TRIED)
    assert found["llama"]["tier"] == found["deepseek_v3"]["tier"] == "paged"
    assert found["deepseek_v3"]["attention"] == "latents"
    half = 32 + 8  # a latent and a rotary key
    assert found["deepseek_v3"]["bytes_per_token"] == 4 * half * 2
    assert found["prism_hadamard_qwen35"]["tier"] == "not tried"
    assert "packed weights" in found["prism_hadamard_qwen35"]["reason"]


def test_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "no_such_model"]) == 2
    assert "no_such_model" in capsys.readouterr().err
