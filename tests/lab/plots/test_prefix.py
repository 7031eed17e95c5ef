from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo_lab.plots import figure as plots
from octavo_lab.plots import prefix as prefix_plot

TTFT = {"prefix_tokens": 256, "cold_s": 0.4, "warm_s": 0.02, "warm_share": 0.05, "cached_tokens": 256}


CHATTED = {"num_pages": 20, "hit_ratio": 0.5, "ttft_s": 0.1}


MEASURED: dict[str, Any] = {
    "ttft": [TTFT],
    "pools": [CHATTED],
    "salts": {"shared": CHATTED, "per_conversation": CHATTED},
    "cost": {
        "cost": 0.004,
        "cost_interval": [-0.01, 0.02],
        "rounds": 10,
        "control": {"median": 0.0, "low": -0.01, "high": 0.01},
    },
    "states": [CHATTED | {"snapshots": "tail", "num_snapshots": 3, "snapshot_bytes": 1 << 20}],
}


@pytest.mark.parametrize("names", [(), ("ttft",), ("cost",), ("salts", "cost"), tuple(MEASURED)])
def test_each_experiment_that_was_run_has_a_panel(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []

    @contextmanager
    def kept(path: Path, **options: Any) -> Iterator[list[Any]]:
        with plots.picture(path, **options) as axes:
            yield axes
            drawn.extend(axis for axis in axes if axis.get_visible())

    monkeypatch.setattr(prefix_plot, "picture", kept)
    result = {name: MEASURED[name] for name in names} | {"model": "m", "kv_format": "f", "backend": "b"}
    if "pools" in names:
        result["cache_off"] = CHATTED
    prefix_plot.plot(result, tmp_path / "prefix.png")
    assert (tmp_path / "prefix.png").stat().st_size > 1000
    titles = ("prefix cold and warm", "in rotation", "salts", "share nothing", "snapshots taken")
    assert len(drawn) == len(names)
    for name, axis in zip(names, drawn, strict=True):
        assert titles[list(MEASURED).index(name)] in axis.get_title()
        assert axis.lines or axis.patches
