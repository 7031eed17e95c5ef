from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType

import mlx.core as mx
import pytest

from octavo.kernels import backends
from octavo.kernels.backends import choose_backend
from octavo.kernels.metal.backend import MetalBackend


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("octavo.kernels._ext", raising=False)
    monkeypatch.delitem(sys.modules, "octavo.kernels.cpu.backend", raising=False)
    monkeypatch.setitem(sys.modules, "octavo.kernels._ext", None)


@pytest.fixture
def no_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)


def test_reference_is_there_everywhere() -> None:
    choice = choose_backend("reference")
    assert choice.backend.name == "reference"
    assert "slow" in choice.reason


@pytest.mark.usefixtures("no_metal", "no_extension")
def test_auto_falls_back_and_reports_it() -> None:
    choice = choose_backend("auto")
    assert choice.backend.name == "reference"
    assert "slow path" in choice.reason
    assert "extension does not load" in choice.reason


@pytest.mark.usefixtures("no_metal")
@pytest.mark.parametrize("version", [None, backends.ABI_VERSION - 1, backends.ABI_VERSION + 1])
def test_a_stale_extension_is_not_used(monkeypatch: pytest.MonkeyPatch, version: int | None) -> None:
    stale = ModuleType("octavo.kernels._ext")
    if version is not None:
        stale.ABI_VERSION = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo.kernels._ext", stale)
    monkeypatch.setattr("octavo.kernels._ext", stale, raising=False)
    monkeypatch.delitem(sys.modules, "octavo.kernels.cpu.backend", raising=False)
    assert "built from other sources" in choose_backend("auto").reason


@pytest.mark.usefixtures("no_metal", "no_extension")
def test_cpu_is_refused_without_its_extension() -> None:
    with pytest.raises(ValueError, match=r"'cpu' cannot run: .* does not load .*; .* --backend reference"):
        choose_backend("cpu")


def test_metal_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no Metal device"):
        choose_backend("metal")


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)


@pytest.mark.usefixtures("metal")
def test_auto_on_a_mac_names_the_failed_self_test() -> None:
    choice = choose_backend("auto")
    assert choice.backend.name == "reference"
    assert "fail their self-test here (fp4: [metal_kernel] No Metal back-end" in choice.reason


@pytest.mark.usefixtures("metal")
def test_metal_by_name_is_used_with_a_warning() -> None:
    choice = choose_backend("metal")
    assert choice.backend.name == "metal"
    assert "as requested, although they fail their self-test here (fp4: [metal_kernel]" in choice.reason


@pytest.mark.usefixtures("metal")
def test_auto_on_a_mac_takes_kernels_that_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetalBackend, "find_problem", lambda _: None)
    choice = choose_backend("auto")
    assert choice.backend.name == "metal"
    assert "self-test" in choice.reason


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda' is not known; use one of auto, metal, cpu, reference"):
        choose_backend("cuda")
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        choose_backend("auto", threads=0)


def test_the_cpu_backend_names_its_instruction_set(no_metal: None) -> None:
    del no_metal
    if backends._load_native(None, exact=False)[0] is None:
        pytest.skip(backends._load_native(None, exact=False)[1])
    choice = choose_backend("auto", threads=1)
    assert choice.backend.name == "cpu"
    assert "1 threads" in choice.reason


def test_a_wrong_mlx_version_is_reported_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    pinned = backends.pinned_version(importlib.metadata.requires("octavo") or ())
    assert pinned == real("mlx")
    assert backends.wrong_mlx() is None
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9" if name == "mlx" else real(name))
    monkeypatch.setitem(sys.modules, "octavo.kernels._ext", None)
    choice = choose_backend("auto")
    assert choice.backend.name == "reference"
    for word in ("9.9.9", f"pip install 'mlx[cpu]=={pinned}'"):
        assert word in choice.reason
    with pytest.raises(ValueError, match=r"9\.9\.9"):
        choose_backend("cpu")


def test_the_pin_is_found_among_requirements() -> None:
    lines = ["mlx-lm<0.33,>=0.32.2", "numpy<3", 'mlx[cpu]==0.32.4; platform_system == "Linux"']
    assert backends.pinned_version(lines) == "0.32.4"
    assert backends.pinned_version(['mlx==0.32.4; platform_system == "Darwin"']) == "0.32.4"
    assert backends.pinned_version(["mlx-lm==0.32.2", "numpy"]) is None


@pytest.mark.parametrize(
    ("backend", "isa", "rows"),
    [
        ("cpu", "amx", 16),
        ("cpu", "avx512", 1),
        ("cpu", "avx2", 1),
        ("cpu", "generic", 1),
        ("metal", "amx", 1),
    ],
)
def test_rows_of_a_tile_are_those_of_the_kernels_that_serve(
    monkeypatch: pytest.MonkeyPatch, backend: str, isa: str, rows: int
) -> None:
    monkeypatch.setattr(backends, "native_instructions", lambda: (isa, 2))
    assert backends.row_tile(backend) == rows
