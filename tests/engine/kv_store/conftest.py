from __future__ import annotations

import pytest

from octavo.engine.kv_store import reader


@pytest.fixture(autouse=True)
def patient_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "STALL_S", 60.0)
    monkeypatch.setattr(reader, "WAIT_S", 60.0)
