from __future__ import annotations

import importlib.metadata
import itertools
import os

import mlx.core as mx
import numpy as np
import pytest

from native import available_levels, require_extension, run_python

_ext = require_extension()
SHOW = "from octavo.kernels import _ext; print(_ext.isa(), _ext.threads())"


def test_it_was_built_for_the_installed_mlx() -> None:
    assert _ext.mlx_version == importlib.metadata.version("mlx")


def test_the_best_level_is_chosen_unless_a_variable_lowers_it() -> None:
    levels = available_levels()
    assert levels[0] == "generic"
    chosen = run_python(SHOW, OCTAVO_CPU_ISA="").stdout.split()[0]
    assert chosen == levels[-1]
    assert run_python(SHOW, OCTAVO_CPU_ISA="generic").stdout.split()[0] == "generic"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OCTAVO_CPU_ISA", "sse9", "must be one of generic, avx2, avx512, amx"),
        ("OCTAVO_CPU_THREADS", "0", "must be a whole number from 1 to 1024"),
        ("OCTAVO_CPU_THREADS", "2x", "must be a whole number from 1 to 1024"),
    ],
)
def test_wrong_variables_are_refused_at_import(variable: str, value: str, message: str) -> None:
    done = run_python(SHOW, **{variable: value})
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError:")
    assert message in last
    assert value in last


def test_a_wrong_variable_does_not_lead_to_the_slow_path() -> None:
    done = run_python(
        "from octavo.engine.cli import main; raise SystemExit(main(['generate', 'x']))", OCTAVO_CPU_ISA="sse9"
    )
    assert done.returncode == 2
    assert done.stderr.strip().startswith("octavo generate: error: OCTAVO_CPU_ISA must be one of")
    assert "\n" not in done.stderr.strip()


def test_threads_follow_the_variable_and_the_affinity_mask() -> None:
    assert run_python(SHOW, OCTAVO_CPU_THREADS="7").stdout.split()[1] == "7"
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no affinity masks")
    one = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}}); {SHOW}"
    assert run_python(one, OCTAVO_CPU_THREADS="").stdout.split()[1] == "1"


def test_the_variable_comes_before_a_quota_and_is_reported() -> None:
    load = """
from octavo.kernels import backends
backends.available_threads, backends.allowed_cpus = lambda: 2, lambda: 4
from octavo.engine.api.config import EngineConfig
from octavo.engine.executor.load import load_runner
info = load_runner(EngineConfig(model="demo", num_pages=8, backend="cpu")).info
print(info.threads, info.backend_reason)
"""
    told = run_python(load, OCTAVO_CPU_THREADS="1").stdout
    assert told.startswith("1 native")
    assert "1 threads" in told


def test_set_threads() -> None:
    before = _ext.threads()
    try:
        for n in (1, 3, before):
            _ext.set_threads(n)
            assert _ext.threads() == n
        for n in (0, -1, 1025):
            with pytest.raises(ValueError, match=rf"threads must lie in \[1, 1024\], got {n}"):
                _ext.set_threads(n)
    finally:
        _ext.set_threads(before)


def test_every_item_is_computed_by_however_many_threads() -> None:
    rng = np.random.default_rng(1)
    before = _ext.threads()
    try:
        for threads, panels in itertools.product((1, 2, 5, 16), (1, 2, 3, 16, 37)):
            _ext.set_threads(threads)
            weight = rng.integers(-4, 5, (64 * panels, 32)).astype(np.float32)
            packed = _ext.pack_dense(mx.array(weight))
            for _ in range(20):
                x = rng.integers(-4, 5, (3, 32)).astype(np.float32)
                assert np.array_equal(np.array(_ext.linear(mx.array(x), packed)), x @ weight.T)
    finally:
        _ext.set_threads(before)
