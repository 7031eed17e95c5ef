from __future__ import annotations

import pytest

from octavo_lab.kernels.kernel_timings import Timing


class Machine:
    def __init__(self, layer_s: float, first_s: float = 0.0) -> None:
        self.now = 0.0
        self.passes: list[int] = []
        self._layer_s = layer_s
        self._first_s = first_s

    def run(self, num_layers: int) -> None:
        self.now += num_layers * self._layer_s + (0 if self.passes else self._first_s)
        self.passes.append(num_layers)

    def seconds_of_layer(self, num_layers: int) -> float:
        timing = Timing(repeats=3, clock=lambda: self.now, longest=1.0)
        return timing.seconds_of_layer(self.run, num_layers)


@pytest.mark.parametrize(
    ("layer_s", "num_layers", "passes"),
    [
        (0.01, 50, [1, 1, 50, 50, 50, 50]),  # all layers, once untimed, then the best of three
        (1 / 32, 1, [1, 1, *[1] * 33]),
        (1 / 32, 8, [1, 1, 8, 8, 8, 8, 8]),
        (0.25, 50, [1, 1, 4, 4, 4, 4]),  # as many layers as take a second
        (1.5, 50, [1, 1]),
        (9.0, 50, [1]),
    ],
)
def test_a_pass_has_as_many_layers_as_there_is_time_for(
    layer_s: float, num_layers: int, passes: list[int]
) -> None:
    machine = Machine(layer_s)
    assert machine.seconds_of_layer(num_layers) == pytest.approx(layer_s)
    assert machine.passes == passes


def test_the_first_calls_overhead_does_not_shorten_passes() -> None:
    machine = Machine(0.01, first_s=2.0)
    assert machine.seconds_of_layer(50) == pytest.approx(0.01)
    assert machine.passes[-1] == 50
