"""Disks that are quick enough for tests."""

from __future__ import annotations

import time

import pytest

from octavo.engine.kv_store.disk_tier import DiskTier
from octavo.scheduler import Sequence


def wait_for_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives way goes when its pages are on disk: how quick that is, is not the question here."""
    keep = DiskTier.keep

    def patient(self: DiskTier, sequence: Sequence, token_s: float | None) -> None:
        keep(self, sequence, token_s)
        end = time.monotonic() + 10
        while self._writer._num_queued and time.monotonic() < end:
            time.sleep(0.001)

    monkeypatch.setattr(DiskTier, "keep", patient)
