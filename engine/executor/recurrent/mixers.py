"""Search for a model's mixers: the modules with recurrent states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.convolution import Conv1d

from ..mlx_lm_import import cache as caches_of_mlx_lm
from ..overrides import overridden
from .cut_points import CHILDREN, METHODS, WHOLE, CutPoint, catching
from .mamba_scan import INPUTS, Inputs


class MixerError(RuntimeError):
    """The model uses its recurrent state in an unsupported way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """Module that uses one recurrent cache, and its replaceable parts."""

    name: str
    module: Module
    state: int
    entries: frozenset[int]
    touches_kv: bool
    functions: frozenset[str]
    convs: tuple[Module, ...]
    shifts: tuple[Module, ...]
    children: tuple[tuple[Module, CutPoint], ...]
    methods: tuple[tuple[str, CutPoint], ...]
    ropes: tuple[Module, ...]
    scan_inputs: Inputs | None

    @property
    def shifts_heads(self) -> bool:
        """Whether attention mixes K and V of neighbouring rows (baichuan_m1)."""
        return hasattr(self.module, "_custom_convolution")

    @property
    def is_cut_point(self) -> bool:
        return _kind(self.module) in WHOLE

    @property
    def has_cut_points(self) -> bool:
        if self.is_cut_point:
            return len(self.entries) == 1
        if self.touches_kv:
            return self.shifts_heads and len(self.entries) == 2
        cuts = (self.convs, self.functions, self.shifts, self.children, self.methods)
        return sum(map(len, cuts)) + (self.scan_inputs is not None) == len(self.entries)


@dataclass(slots=True)
class Observed:
    stack: list[Module] = field(default_factory=list)
    states: list[tuple[int, int, list[Module]]] = field(default_factory=list)
    kv: list[list[Module]] = field(default_factory=list)
    functions: dict[int, set[str]] = field(default_factory=dict)

    def catch(
        self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.functions.setdefault(id(self.stack[-1]), set()).add(name)
        return plain(*args, **kwargs)


class RecordingState(caches_of_mlx_lm.ArraysCache):
    def __init__(self, size: int, index: int, observed: Observed) -> None:
        super().__init__(size)
        self.index = index
        self._observed = observed

    def _note(self, entry: int) -> None:
        if 0 <= entry < len(self.cache):
            self._observed.states.append((self.index, entry, list(self._observed.stack)))

    def __getitem__(self, entry: int) -> Any:
        self._note(entry)
        return super().__getitem__(entry)  # type: ignore[no-untyped-call]

    def __setitem__(self, entry: int, value: mx.array) -> None:
        self._note(entry)
        super().__setitem__(entry, value)  # type: ignore[no-untyped-call]


def record_kv(cache: Any, observed: Observed) -> Any:
    plain = cache.update_and_fetch

    def update_and_fetch(*args: Any, **kwargs: Any) -> Any:
        observed.kv.append(list(observed.stack))
        cache.holds_keys_alone = args[0] is args[1] or args[1].size == 0
        return plain(*args, **kwargs)

    cache.update_and_fetch = update_and_fetch
    return cache


def watch(model: Module, observed: Observed, forwards: Callable[[], None]) -> None:
    def call(module: Module, *args: Any, **kwargs: Any) -> Any:
        observed.stack.append(module)
        try:
            return type(module).__bases__[0].__call__(module, *args, **kwargs)
        finally:
            observed.stack.pop()

    with overridden(_modules(model), call), catching(observed):
        forwards()


def mixers_of(model: Module, observed: Observed) -> tuple[Mixer, ...]:
    names = {id(module): name for name, module in model.named_modules()}
    touching: dict[int, Module] = {}
    for _, _, modules in observed.states:
        if not modules:
            raise MixerError("the model uses a recurrent cache outside of its modules")
        touching[id(modules[-1])] = modules[-1]
    inner = {id(m) for outer in touching.values() for m in _modules(outer) if m is not outer}
    return tuple(_mixer(names[key], module, observed) for key, module in touching.items() if key not in inner)


def _mixer(name: str, module: Module, observed: Observed) -> Mixer:
    touched = [(i, e) for i, e, modules in observed.states if any(m is module for m in modules)]
    states = {index for index, _ in touched}
    if len(states) != 1:
        raise MixerError(f"{name} uses the states of several layers")
    within = list(_modules(module))
    home = type(module).__module__.rsplit(".", 1)[-1]
    return Mixer(
        name=name,
        module=module,
        state=states.pop(),
        entries=frozenset(entry for _, entry in touched),
        touches_kv=any(any(m is module for m in modules) for modules in observed.kv),
        functions=frozenset().union(*(observed.functions.get(id(m), set()) for m in within)),
        convs=tuple(m for m in within if is_depthwise(m)),
        shifts=tuple(m for m in within if type(m).__name__ == "TokenShift"),
        children=tuple((m, CHILDREN[kind]) for m in within if (kind := _kind(m)) in CHILDREN),
        methods=tuple(
            (method, cut)
            for (file, method), cut in METHODS.items()
            if file == home and hasattr(module, method)
        ),
        ropes=tuple(m for path, m in module.named_modules() if path.rsplit(".", 1)[-1] == "rope"),
        scan_inputs=INPUTS.get(_kind(module)),
    )


def _modules(module: Module) -> Iterator[Module]:
    return (m for _, m in module.named_modules())


def _kind(module: Module) -> tuple[str, str]:
    return type(module).__module__.rsplit(".", 1)[-1], type(module).__name__


def is_depthwise(module: Module) -> bool:
    return isinstance(module, Conv1d) and module.weight.ndim == 3 and module.weight.shape[2] == 1


def describe_mixers(mixers: Sequence[Mixer]) -> str:
    counts = Counter(mixer.name.rsplit(".", 1)[-1] for mixer in mixers)
    return ", ".join(f"{count} {name}" for name, count in counts.items())
