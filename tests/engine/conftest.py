from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import tiny_models
from computed_drafts import every_draft_is_computed as every_draft_is_computed
from octavo.engine.executor import overrides
from octavo.engine.executor.adapt import install


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def unadapted_gear(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(install.GEAR)
    plain = overrides.original(install.GEAR, "_softcap_attention")
    monkeypatch.setattr(module, "_softcap_attention", plain)
    monkeypatch.setattr(install, "GEAR", "no such module")
