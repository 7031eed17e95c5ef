"""A model's recurrent layers in mixed steps: its mixers bent, its states in slots.

Every token of a step is a row of its own, ``[T, 1]``. A mixer is bent in one of two ways:

segments   the rows are regrouped, ``[B, S, H]`` for segments of equal length, each group with the states of
           its slots; the mixer runs once per group.
ragged     the mixer runs once, on ``[1, T, H]``, as if the step were one sequence with no state: what
           is row by row sees all rows at once. Its cut points are caught, and regrouped there.

Calls with mlx-lm's own caches go to plain mlx-lm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import mlx.core as mx
from mlx.nn.layers.base import Module

from ..mlx_lm_import import cache as caches_of_mlx_lm
from .bending import Call, bend, unbend
from .cut_points import catching
from .cuts import Cuts
from .mixers import Mixer, MixerError
from .recurrences import Recurrences
from .segments import SegmentGroup, StateStep, cut_value, join_values
from .state_pool import StatePool

StateTier = Literal["ragged", "segments"]


class StateShim(caches_of_mlx_lm.ArraysCache):
    """Stands in for one recurrent cache. A subclass, because model code asks ``isinstance`` before it
    writes."""

    def __init__(self, layers: RecurrentLayers, index: int, size: int) -> None:
        super().__init__(size)
        self._layers, self._index, self._size = layers, index, size
        self.group: SegmentGroup | None = None  # the one a mixer computes
        self.mute = False  # ragged: the mixer sees no state and writes none
        self.new: dict[int, mx.array] = {}  # written for the group

    def __getitem__(self, entry: int) -> mx.array | None:
        if not -self._size <= entry < self._size:
            raise IndexError(entry)  # so unpacking a cache ends
        if self.mute:
            return None
        if self.group is None:
            raise MixerError("the model reads a recurrent state outside the modules that did when probed")
        entry %= self._size
        return self.new[entry] if entry in self.new else self._layers.pool.read(self.name(entry), self.group)

    def __setitem__(self, entry: int, value: mx.array) -> None:
        if self.mute:
            return
        if self.group is None:
            raise MixerError("the model writes a recurrent state outside the modules that did when probed")
        self.new[entry % self._size] = value

    def name(self, entry: int) -> str:
        """Of an entry in the pool."""
        return f"{self._index}.{entry}"

    def flush(self, group: SegmentGroup) -> None:
        """Hand over what was written for a group."""
        for entry, value in self.new.items():
            self._layers.pool.write(self.name(entry), group, value)
        self.new = {}

    @property  # type: ignore[misc]
    def state(self) -> Any:
        raise MixerError("the model takes its whole state")

    def advance(self, _count: int) -> None: ...

    def make_mask(self, _count: int) -> None:
        return None

    def empty(self) -> bool:
        return False


class ListShim:
    """Stands in for several caches of one layer."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = tuple(caches)

    def __getitem__(self, i: int) -> Any:
        return self.caches[i]


_CUT_POINTS = {
    "conv": "convolution",
    "shift": "token shift",
    "child": "recurrent module",
    "side": "mixing of heads",
}


class RecurrentLayers:
    """The mixers of a model, bent until ``release``. ``tier`` is what those get that can be ragged;
    ``recurrences`` compute their cut points where they can, mlx-lm's operations the others."""

    def __init__(
        self, mixers: Sequence[Mixer], tier: StateTier, recurrences: Recurrences | None = None
    ) -> None:
        self.mixers = tuple(mixers)
        self.recurrences = recurrences
        self.tier = tier
        self.computed_by: Mapping[str, bool] = {}  # see ``settle``
        self.all_native = False  # kernels alone compute states
        self._pool: StatePool | None = None
        self._bent: list[Module] = []
        for mixer in mixers:
            if tier == "ragged" and mixer.can_be_ragged:
                self._bend_ragged(mixer)
            elif mixer.touches_kv:
                self.release()
                raise MixerError(f"{mixer.name} mixes its state with K and V in a way that has no cut points")
            else:
                self._bend(mixer.module, self._in_segments(mixer))

    def settle(self, computed_by: Mapping[str, bool]) -> None:
        """These computed the states of the probe's steps, by name: a kernel, or operations. For reports: no
        step asks."""
        self.all_native = bool(computed_by) and all(computed_by.values())
        names = [f"{mixer.name}." for mixer in self.mixers]
        self.computed_by = {
            name: native for name, native in computed_by.items() if any(map(name.startswith, names))
        }

    def native_modules(self) -> list[Module]:
        """Modules whose recurrences and convolutions kernels computed wherever a step came to them: what else
        of their own they compute has no state."""
        found: list[Module] = []
        for mixer in self.mixers:
            own = [native for name, native in self.computed_by.items() if name.startswith(f"{mixer.name}.")]
            if own and all(own):
                found += [mixer.module, *mixer.convs, *(child for child, _ in mixer.children)]
        return found

    def count_cut_points(self) -> dict[str, tuple[int, int]]:
        """By what they are called in mlx-lm: how many kernels compute, and how many its own operations do."""
        counts: dict[str, tuple[int, int]] = {}
        for name, native in self.computed_by.items():
            kind = _CUT_POINTS.get(name.rpartition(".")[2].rstrip("0123456789"), name.rpartition(".")[2])
            kernels, operations = counts.get(kind, (0, 0))
            counts[kind] = (kernels + native, operations + (not native))
        return counts

    @property
    def pool(self) -> StatePool:
        assert self._pool is not None, "a recurrent layer is computed outside a step"
        return self._pool

    @property
    def step(self) -> StateStep:
        return self.pool.step

    def begin(self, pool: StatePool, step: StateStep) -> None:
        """From now on mixers compute this step, with the states of this pool."""
        pool.begin_step(step)
        self._pool = pool

    def release(self) -> None:
        """Undo every change of the model."""
        for module in self._bent:
            unbend(module)
        self._bent = []

    def _bend(self, module: Module, call: Call, **methods: Call) -> None:
        bend(module, call, **methods)
        self._bent.append(module)

    def _in_segments(self, mixer: Mixer) -> Call:
        plain = type(mixer.module).__call__

        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            shims = _shims_of(args, kwargs)
            if not shims:
                return plain(module, *args, **kwargs)
            outputs = []
            for group in self.step.groups:
                for shim in shims:
                    shim.group, shim.new = group, {}
                try:
                    given = [cut_value(value, group, self.step) for value in args]
                    named = {name: cut_value(value, group, self.step) for name, value in kwargs.items()}
                    outputs.append(plain(module, *given, **named))
                finally:
                    for shim in shims:
                        shim.group = None
                for shim in shims:
                    shim.flush(group)
            return join_values(outputs, self.step)

        return call

    def _bend_ragged(self, mixer: Mixer) -> None:
        cuts = Cuts(self, mixer)
        kind = type(mixer.module)
        methods = {
            name: cuts.method(f"{mixer.name}.{name}", getattr(kind, name), cut) for name, cut in mixer.methods
        }
        if mixer.shifts_heads:
            methods["_custom_convolution"] = cuts.shifted_heads(kind._custom_convolution)  # type: ignore[attr-defined]
        if mixer.scan_inputs is not None:
            methods["_process_sequence"] = cuts.scanned(kind._process_sequence, mixer.scan_inputs)  # type: ignore[attr-defined]
        for i, conv in enumerate(mixer.convs):
            self._bend(conv, cuts.conv(f"{mixer.name}.conv{i}", conv))
        for i, shift in enumerate(mixer.shifts):
            self._bend(shift, cuts.shift(f"{mixer.name}.shift{i}", type(shift).__call__))
        for i, (child, cut) in enumerate(mixer.children):
            self._bend(child, cuts.child(f"{mixer.name}.child{i}", type(child).__call__, cut))
        for rope in () if mixer.touches_kv else mixer.ropes:
            self._bend(rope, cuts.rope(type(rope).__call__))
        self._bend(mixer.module, self._ragged(mixer, cuts), **methods)

    def _ragged(self, mixer: Mixer, cuts: Cuts) -> Call:
        plain = type(mixer.module).__call__

        def call(module: Module, *args: Any, **kwargs: Any) -> Any:
            shims = _shims_of(args, kwargs)
            if not shims:
                return plain(module, *args, **kwargs)
            rows = 0 if mixer.touches_kv else self.step.num_rows
            cuts.is_active, cuts.num_shifted = True, 0
            for shim in shims:
                shim.mute = True
            try:
                with catching(cuts):
                    given = [_turned(value, rows) for value in args]
                    out = plain(
                        module, *given, **{name: _turned(value, rows) for name, value in kwargs.items()}
                    )
            finally:
                cuts.is_active = False
                for shim in shims:
                    shim.mute = False
            return _turned(out, rows)

        return call


def _shims_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[StateShim]:
    found: list[StateShim] = []
    for value in (*args, *kwargs.values()):
        parts = value.caches if isinstance(value, ListShim) else (value,)
        found += [part for part in parts if isinstance(part, StateShim)]
    return found


def _turned(value: Any, rows: int) -> Any:
    """[T, 1, ..] <-> [1, T, ..]; tuples part by part."""
    if isinstance(value, tuple):
        return tuple(_turned(part, rows) for part in value)
    if isinstance(value, mx.array) and value.ndim >= 2 and sorted(value.shape[:2]) == sorted((1, rows)):
        return value.swapaxes(0, 1)
    return value
