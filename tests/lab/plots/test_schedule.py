from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo_lab.bench import schedule as bench
from octavo_lab.plots import figure
from octavo_lab.plots import schedule as schedule_plot


def results(*options: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    found = bench.run(parser.parse_args(options))
    assert json.loads(json.dumps(found)) == found
    return dict(found["traffic"])


def test_the_plot_shows_the_course_of_every_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []

    @contextmanager
    def kept(path: Path, **options: Any) -> Iterator[list[Any]]:
        with figure.picture(path, **options) as axes:
            yield axes
            drawn.extend(axes)

    monkeypatch.setattr(schedule_plot, "picture", kept)
    path = tmp_path / "schedule.png"
    options = ["--traffic", "flood", "--traffic", "growth", "--order", "fcfs", "--order", "vtc"]
    found = results(*options, "--plot", str(path))
    assert path.stat().st_size > 1000
    rows = {f"{name}, {order}": row for name, orders in found.items() for order, row in orders.items()}
    for axis in drawn:
        assert [line.get_label() for line in axis.lines] == list(rows)
    ttft, fairness, waits, preemptions = ([list(line.get_ydata()) for line in axis.lines] for axis in drawn)
    for number, row in enumerate(rows.values()):
        assert ttft[number][-1] == 100
        assert max(fairness[number]) == row["service_gap"]
        assert 0 < max(waits[number]) <= row["longest_wait_s"]
        assert preemptions[number] == sorted(preemptions[number])
        assert preemptions[number][-1] == row["preemptions"]
    assert rows["growth, fcfs"]["preemptions"] > 0
