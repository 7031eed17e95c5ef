from __future__ import annotations

import time

import pytest

from octavo.engine.kv_store.disk_tier import DiskTier
from octavo.engine.kv_store.prefetch import Rate
from octavo.scheduler import Sequence


def wait_for_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted pages go to disk, and reading is assumed to take no time."""
    offload = DiskTier.offload

    def patient(self: DiskTier, sequence: Sequence, token_s: float | None) -> None:
        offload(self, sequence, token_s)
        end = time.monotonic() + 60
        while self._writer._num_queued:
            assert time.monotonic() < end, "nothing is written"
            time.sleep(0.001)

    monkeypatch.setattr(DiskTier, "offload", patient)
    monkeypatch.setattr(Rate, "seconds", lambda self, num_bytes: 0.0)  # noqa: ARG005
