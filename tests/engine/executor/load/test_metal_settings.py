from __future__ import annotations

import os
import sys

import mlx.core as mx
import pytest

from octavo.engine.api.config import EngineConfig
from octavo.engine.executor.load import metal_settings
from octavo.engine.executor.load.metal_settings import (
    ELEMENTS_VARIABLE,
    MIN_CACHE,
    OPERATIONS_VARIABLE,
    prepare_device,
    set_memory_limits,
    usable_memory,
)

GIB = 1 << 30


@pytest.fixture(autouse=True)
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    device_has(monkeypatch, 96 * GIB)
    for name in (OPERATIONS_VARIABLE, ELEMENTS_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def device_has(monkeypatch: pytest.MonkeyPatch, recommended: int | None) -> None:
    monkeypatch.setattr(metal_settings, "_is_metal", lambda: recommended is not None)
    monkeypatch.setattr(metal_settings, "_working_set", lambda: recommended)


def test_variables_set_by_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ELEMENTS_VARIABLE, "7")
    prepare_device(EngineConfig(), {"num_hidden_layers": 2}, GIB)
    assert (os.environ[OPERATIONS_VARIABLE], os.environ[ELEMENTS_VARIABLE]) == ("1000", "7")


def test_only_a_mac_that_may_use_metal_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_device(EngineConfig(backend="cpu"), {}, 0)
    monkeypatch.setattr(sys, "platform", "linux")
    prepare_device(EngineConfig(), {}, 0)
    assert not {OPERATIONS_VARIABLE, ELEMENTS_VARIABLE} & os.environ.keys()


def test_memory_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(mx, "set_wired_limit", lambda size: calls.append(("wired", size)))
    monkeypatch.setattr(mx, "set_cache_limit", lambda size: calls.append(("cache", size)))
    set_memory_limits(5 * GIB)
    set_memory_limits(50 << 20)
    device_has(monkeypatch, None)
    set_memory_limits(50 << 20)
    device_has(monkeypatch, 0)
    set_memory_limits(2 * GIB)
    wired = ("wired", 96 * GIB)
    assert calls[:4] == [wired, ("cache", 5 * GIB), wired, ("cache", MIN_CACHE)]
    assert calls[4:] == [("cache", 50 << 20), ("cache", 2 * GIB)]


def test_pages_and_weights_fit_into_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal_settings, "available_memory", lambda: 128 * GIB)
    assert usable_memory(40 * GIB) == 56 * GIB
    assert usable_memory(100 * GIB) == 0
    for recommended in (None, 0):
        device_has(monkeypatch, recommended)
        assert usable_memory(40 * GIB) == 128 * GIB
    device_has(monkeypatch, 96 * GIB)
    monkeypatch.setattr(metal_settings, "available_memory", lambda: 3 * GIB)
    assert usable_memory(40 * GIB) == 3 * GIB
