"""What several files of parity tests run on."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny_models
from attention_backends import BACKENDS, TestedBackend


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> str:
    chosen: TestedBackend = request.param
    chosen.create()
    return chosen.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_model(tmp_path_factory.mktemp("llama"), "llama")
