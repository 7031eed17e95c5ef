"""Recurrent layers in mixed steps, with states in slots.

Every token of a step is a row, ``[T, 1]``. A recurrent layer runs once on all rows, ``[1, T, H]``, and
reads the state slot of each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from ..mlx_lm_import import cache as caches_of_mlx_lm
from ..overrides import Call, override_call, restore_call
from .cut_points import catching
from .cuts import Cuts
from .mixers import Mixer, MixerError
from .recurrences import Recurrences
from .segments import StateStep
from .state_pool import StatePool


class StateShim(caches_of_mlx_lm.ArraysCache):
    """Placeholder of a recurrent cache. Unexpected access raises MixerError."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._size = size
        self.mute = False  # True: reads return None and writes are dropped

    def __getitem__(self, entry: int) -> None:
        if not -self._size <= entry < self._size:
            raise IndexError(entry)
        if not self.mute:
            raise MixerError(
                "the model reads a recurrent state in a module that did not read it during "
                "the load-time probe"
            )

    def __setitem__(self, entry: int, value: mx.array) -> None:
        if not self.mute:
            raise MixerError(
                "the model writes a recurrent state in a module that did not write it during "
                "the load-time probe"
            )

    @property  # type: ignore[misc]
    def state(self) -> Any:
        raise MixerError("the model reads all entries of a recurrent cache at once")

    def advance(self, _count: int) -> None: ...

    def make_mask(self, _count: int) -> None:
        return None

    def empty(self) -> bool:
        return False


_MAX_ERROR = {mx.float32: 1e-3, mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6}
"""Largest error of a kernel, relative to the largest value."""

_CUT_POINTS = {
    "conv": "convolution",
    "shift": "token shift",
    "child": "recurrent module",
    "side": "mixing of heads",
}


class RecurrentLayers:
    """Recurrent layers of a model. Raises MixerError for unsupported layers."""

    def __init__(self, mixers: Sequence[Mixer], recurrences: Recurrences | None = None) -> None:
        self.mixers = tuple(mixers)
        self.recurrences = Recurrences(None) if recurrences is None else recurrences
        self.computed_by: Mapping[str, bool] = {}
        self.all_native = False
        self.compared: dict[str, tuple[mx.array, mx.array]] | None = None
        self._pool: StatePool | None = None
        self._overridden: list[Module] = []
        for mixer in mixers:
            if not mixer.has_cut_points:
                self.release()
                raise MixerError(f"{mixer.name} has state outside of its recurrence and convolution")
            self._override_mixer(mixer)

    def settle(self, computed_by: Mapping[str, bool]) -> None:
        self.all_native = bool(computed_by) and all(computed_by.values())
        names = [f"{mixer.name}." for mixer in self.mixers]
        self.computed_by = {
            name: native for name, native in computed_by.items() if any(map(name.startswith, names))
        }

    def compare(self, name: str, found: mx.array, by_mlx_lm: Callable[[], mx.array]) -> None:
        if self.compared is None or name in self.compared:
            return
        if all(group.fresh and group.wave == 0 for group in self.step.groups):
            self.compared[name] = found, by_mlx_lm()

    def wrong_kernel(self) -> str | None:
        compared, self.compared = self.compared or {}, None
        for name, (found, wanted) in compared.items():
            got, right = (np.array(each.astype(mx.float32)).reshape(-1) for each in (found, wanted))
            error = float(np.abs(got - right).max() / (np.abs(right).max() + 1e-30))
            limit = _MAX_ERROR[found.dtype]
            if not error <= limit:  # NaN counts as too large
                return (
                    f"native layer {name} must compute what mlx-lm's does within {limit:.2g} of the largest "
                    f"value, got an error of {error:.2g}"
                )
        return None

    def native_modules(self) -> list[Module]:
        found: list[Module] = []
        for mixer in self.mixers:
            own = [native for name, native in self.computed_by.items() if name.startswith(f"{mixer.name}.")]
            if own and all(own):
                found += [mixer.module, *mixer.convs, *(child for child, _ in mixer.children)]
        return found

    def count_cut_points(self) -> dict[str, tuple[int, int]]:
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
        pool.begin_step(step)
        self._pool = pool

    def release(self) -> None:
        for module in reversed(self._overridden):
            restore_call(module)
        self._overridden = []

    def _override(self, module: Module, call: Call, **methods: Call) -> None:
        override_call(module, call, **methods)
        self._overridden.append(module)

    def _override_mixer(self, mixer: Mixer) -> None:
        cuts = Cuts(self, mixer)
        kind = type(mixer.module)
        if mixer.is_cut_point:
            self._override(mixer.module, cuts.whole(f"{mixer.name}.whole", kind.__call__))
            return
        methods = {
            name: cuts.method(f"{mixer.name}.{name}", getattr(kind, name), cut) for name, cut in mixer.methods
        }
        if mixer.shifts_heads:
            methods["_custom_convolution"] = cuts.shifted_heads(kind._custom_convolution)  # type: ignore[attr-defined]
        if mixer.scan_inputs is not None:
            methods["_process_sequence"] = cuts.scanned(kind._process_sequence, mixer.scan_inputs)  # type: ignore[attr-defined]
        for i, conv in enumerate(mixer.convs):
            self._override(conv, cuts.conv(f"{mixer.name}.conv{i}", conv))
        for i, shift in enumerate(mixer.shifts):
            self._override(shift, cuts.shift(f"{mixer.name}.shift{i}", type(shift).__call__))
        for i, (child, cut) in enumerate(mixer.children):
            self._override(child, cuts.child(f"{mixer.name}.child{i}", type(child).__call__, cut))
        for rope in () if mixer.touches_kv else mixer.ropes:
            self._override(rope, cuts.rope(type(rope).__call__))
        self._override(mixer.module, self._on_all_rows(mixer, cuts), **methods)

    def _on_all_rows(self, mixer: Mixer, cuts: Cuts) -> Call:
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
        parts = value.caches if isinstance(value, caches_of_mlx_lm.CacheList) else (value,)
        found += [part for part in parts if isinstance(part, StateShim)]
    return found


def _turned(value: Any, rows: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_turned(part, rows) for part in value)
    if isinstance(value, mx.array) and value.ndim >= 2 and sorted(value.shape[:2]) == sorted((1, rows)):
        return value.swapaxes(0, 1)
    return value
