from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from octavo.engine.api.config import EngineConfig
from octavo.engine.cli.doctor import _metal_lines
from octavo.engine.executor.load import metal_settings
from octavo.engine.executor.load.metal_settings import (
    LEAST_CACHE,
    MLXDevice,
    describe_settings,
    prepare_device,
    set_command_buffers,
    set_memory_limits,
    usable_memory,
)

GIB = 1 << 30


@dataclass
class FakeDevice:
    metal: bool = True
    recommended: int = 96 * GIB
    calls: list[tuple[str, int]] = field(default_factory=list)

    def is_metal(self) -> bool:
        return self.metal

    def working_set(self) -> int:
        assert self.metal, "nobody else has one"
        return self.recommended

    def set_wired_limit(self, size: int) -> None:
        self.calls.append(("wired", size))

    def set_cache_limit(self, size: int) -> None:
        self.calls.append(("cache", size))


@pytest.mark.parametrize(
    ("pool", "weights", "layers", "mebi"),
    [
        (8 * GIB, 0, 28, 586),
        (8 * GIB, 4 * GIB, 28, 878),
        (1 << 20, 0, 28, 50),  # the limit is never below MLX's own
        (GIB, 0, 0, 2048),
    ],
)
def test_a_command_buffer_holds_four_layers(pool: int, weights: int, layers: int, mebi: int) -> None:
    environ: dict[str, str] = {}
    set_command_buffers(environ, pool_bytes=pool, weight_bytes=weights, num_layers=layers)
    assert environ == {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": str(mebi)}
    assert mebi << 20 >= 4 * (pool + weights) // max(layers, 1) // 2


def test_what_the_user_has_set_stays() -> None:
    environ = {"MLX_MAX_MB_PER_BUFFER": "7"}
    set_command_buffers(environ, pool_bytes=GIB, weight_bytes=GIB, num_layers=2)
    assert environ == {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "7"}


def test_only_a_mac_that_may_use_metal_is_prepared() -> None:
    environ: dict[str, str] = {}
    config = EngineConfig(model="demo", kv_memory=8 * GIB)
    nested = {"text_config": {"num_hidden_layers": 28}}
    prepare_device(config, nested, 0, environ=environ, platform="linux")
    cpu = EngineConfig(model="demo", backend="cpu")
    prepare_device(cpu, nested, 0, environ=environ, platform="darwin")
    assert environ == {}
    prepare_device(config, nested, 0, environ=environ, platform="darwin")
    assert environ["MLX_MAX_MB_PER_BUFFER"] == "586"


def test_memory_limits() -> None:
    device = FakeDevice()
    set_memory_limits(5 * GIB, device)
    set_memory_limits(50 << 20, device)
    assert device.calls == [
        ("wired", 96 * GIB),
        ("cache", 5 * GIB),
        ("wired", 96 * GIB),
        ("cache", LEAST_CACHE),
    ]
    elsewhere = FakeDevice(metal=False)
    set_memory_limits(50 << 20, elsewhere)
    assert elsewhere.calls == [("cache", 50 << 20)]
    silent = FakeDevice(recommended=0)
    set_memory_limits(2 * GIB, silent)
    assert silent.calls == [("cache", 2 * GIB)]


def test_pages_fit_beside_the_weights_in_what_the_gpu_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal_settings, "available_memory", lambda: 128 * GIB)
    assert usable_memory(40 * GIB, FakeDevice()) == 56 * GIB
    assert usable_memory(100 * GIB, FakeDevice()) == 0
    assert usable_memory(40 * GIB, FakeDevice(metal=False)) == 128 * GIB
    assert usable_memory(40 * GIB, FakeDevice(recommended=0)) == 128 * GIB
    monkeypatch.setattr(metal_settings, "available_memory", lambda: 3 * GIB)
    assert usable_memory(40 * GIB, FakeDevice()) == 3 * GIB


def test_the_doctor_prints_them() -> None:
    unset = describe_settings(FakeDevice(), {})
    assert unset is not None
    lines = _metal_lines(unset)
    assert lines[0] == "Metal memory: 96.0 GiB wired, at least 1.00 GiB of freed buffers kept"
    assert "MLX_MAX_MB_PER_BUFFER=set by the size of the pool" in lines[1]
    assert (
        "MLX_MAX_OPS_PER_BUFFER=9,"
        in _metal_lines(describe_settings(FakeDevice(), {"MLX_MAX_OPS_PER_BUFFER": "9"}))[1]
    )
    assert describe_settings(FakeDevice(metal=False), {}) is None
    assert _metal_lines(None) == []


def test_the_device_is_set_up_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLX reads the variables when it first uses its device."""
    from octavo.engine.executor.load import load

    class Stop(Exception):
        pass

    def first_use(_: EngineConfig) -> None:
        raise Stop(",".join(order))

    order: list[str] = []
    monkeypatch.setattr(load, "prepare_device", lambda *_: order.append("prepared"))
    monkeypatch.setattr(load, "choose_device", first_use)
    with pytest.raises(Stop, match=r"^prepared$"):
        load.load_paged_runner(EngineConfig(model="demo"))


def test_this_machine_answers() -> None:
    device = MLXDevice()
    assert device.is_metal() is False or device.working_set() > 0
