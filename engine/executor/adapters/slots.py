"""Adapters of a loaded model, and the slots of adapters in use.

If all slots are taken, the least recently used adapter without running requests loses its slot.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module

from octavo.kernels.interface import MAX_TABLE_LAYERS, AttentionBackend

from ...api.config import EngineConfig
from ...api.engine_info import AdapterInfo
from ...api.errors import InvalidConfig, InvalidRequest, NotFound
from ...memory.model_files import served_name
from ..base import Adapters
from ..row_inputs import RowInputs
from .files import Factors, read_adapter
from .layers import Layer, RankLayers, Shape, Table, adapt_layers

Floats = npt.NDArray[np.float32]
_TEXT_MODELS = ("model.language_model.", "language_model.model.", "model.")


class NativeTable:
    def __init__(self, shapes: list[Shape], dtype: mx.Dtype, num_slots: int) -> None:
        from octavo.kernels import _ext

        self._ext, self._dtype, self._experts = _ext, dtype, shapes[0].experts
        outputs = [shape.outputs for shape in shapes]
        self._table = _ext.AdapterTable(shapes[0].inputs, outputs, self._experts, num_slots)
        self.put, self.clear = self._table.put, self._table.clear

    def made(self, factors: Factors, gain: mx.array | None, bias: mx.array | None) -> tuple[Any, int]:
        a, b = factors.a.astype(self._dtype), factors.b.astype(self._dtype)
        made = self._ext.adapter_factors(
            a, b, scale=factors.scale, gain=gain, bias=None if gain is None else bias
        )
        return made, made.nbytes

    def add(self, ys: Sequence[mx.array], x: mx.array, slots: mx.array) -> Sequence[mx.array]:
        (y,) = ys
        if self._experts > 1:
            return [self._ext.add_expert_adapters(y, x, slots, self._table)]
        if x.shape[0] == slots.shape[0]:
            slots = slots.reshape(-1, *[1] * (x.ndim - 1))
        return [self._ext.add_adapters(y, x, slots, self._table)]


class KernelTable:
    def __init__(self, table: Any, dtype: mx.Dtype) -> None:
        self._table, self._dtype, self.clear = table, dtype, table.clear

    def made(self, factors: Factors, gain: mx.array | None, bias: mx.array | None) -> tuple[Any, int]:
        a, b = (mx.contiguous(each[0].astype(self._dtype)) for each in (factors.a, factors.b))
        bias = None if gain is None or bias is None else bias.astype(mx.float32)
        mx.eval(a, b, gain, bias)
        nbytes = sum(array.nbytes for array in (a, b, gain, bias) if array is not None)
        return (a, b, factors.scale, gain, bias), nbytes

    def put(self, slot: int, part: int, made: Any) -> None:
        self._table.put(slot, part, *made)

    def add(self, ys: Sequence[mx.array], x: mx.array, slots: mx.array) -> Sequence[mx.array]:
        flat = x.reshape(-1, x.shape[-1])
        slots = slots.reshape(-1)
        if flat.shape[0] != slots.shape[0]:
            slots = mx.repeat(slots, flat.shape[0] // slots.shape[0])
        added = self._table.add([y.reshape(-1, y.shape[-1]) for y in ys], flat, slots)
        return [new.reshape(y.shape) for new, y in zip(added, ys, strict=True)]


class MLXTable:
    def __init__(self, shapes: list[Shape], num_slots: int, max_rank: int) -> None:
        (shape,) = shapes
        self._experts, self._outputs = shape.experts, shape.outputs
        places = (num_slots + 1) * shape.experts
        self._a = mx.zeros((places, shape.inputs, max_rank), mx.float32)
        self._b = mx.zeros((places, max_rank, shape.outputs), mx.float32)
        self._gain: mx.array | None = None
        self._bias = mx.zeros(shape.outputs, mx.float32)
        self._num_slots, self._used = num_slots, set[int]()

    def made(self, factors: Factors, gain: mx.array | None, bias: mx.array | None) -> tuple[Any, int]:
        a = factors.a.astype(mx.float32).swapaxes(1, 2)
        b = factors.scale * factors.b.astype(mx.float32)
        arrays = [mx.contiguous(each) for each in (a, b, gain, bias) if each is not None]
        mx.eval(arrays)
        return (*arrays, None, None)[:4], sum(array.nbytes for array in arrays)

    def put(self, slot: int, part: int, made: Any) -> None:  # noqa: ARG002
        a, b, gain, bias = made
        self.clear(slot)
        first, last, rank = slot * self._experts, (slot + 1) * self._experts, b.shape[1]
        self._a[first:last, :, :rank] = a
        self._b[first:last, :rank, :] = b
        if gain is not None:
            if self._gain is None:
                self._gain = mx.ones((self._num_slots + 1, self._outputs), mx.float32)
            self._gain[slot] = gain
            self._bias = self._bias if bias is None else bias.astype(mx.float32)
        self._used.add(slot)
        mx.eval(self._a, self._b, *(() if self._gain is None else (self._gain,)))

    def clear(self, slot: int) -> None:
        if slot in self._used:
            first, last = slot * self._experts, (slot + 1) * self._experts
            self._a[first:last], self._b[first:last] = 0, 0
            if self._gain is not None:
                self._gain[slot] = 1
            self._used.discard(slot)

    def add(self, ys: Sequence[mx.array], x: mx.array, slots: mx.array) -> Sequence[mx.array]:
        (y,) = ys
        return [self._add(y, x, slots)]

    def _add(self, y: mx.array, x: mx.array, slots: mx.array) -> mx.array:
        if self._experts > 1:
            z = mx.gather_mm(x.astype(mx.float32), self._a, rhs_indices=slots)
            return (y + mx.gather_mm(z, self._b, rhs_indices=slots)).astype(y.dtype)
        ids = slots.reshape(-1)
        flat = x.reshape(ids.shape[0], -1, x.shape[-1]).astype(mx.float32)
        z = mx.gather_mm(mx.gather_mm(flat, self._a, rhs_indices=ids), self._b, rhs_indices=ids)
        sums = y.astype(mx.float32).reshape(z.shape)
        if self._gain is None:
            return (sums + z).reshape(y.shape).astype(y.dtype)
        adapted = self._gain[ids][:, None] * (sums - self._bias + z) + self._bias
        has_gain = mx.any(self._gain[ids] != 1, axis=-1)[:, None, None]
        return mx.where(has_gain, adapted, sums + z).reshape(y.shape).astype(y.dtype)


def table_maker(backend: AttentionBackend, *, num_slots: int, max_rank: int) -> Any:
    def make(shapes: list[Shape], dtype: mx.Dtype) -> Table:
        if backend.has_model_ops:
            return NativeTable(shapes, dtype, num_slots)
        if backend.adapter_tables is None or shapes[0].experts > 1:
            return MLXTable(shapes, num_slots, max_rank)
        outputs = [shape.outputs for shape in shapes]
        kernels = backend.adapter_tables(shapes[0].inputs, outputs, num_slots=num_slots, dtype=dtype)
        return KernelTable(kernels, dtype)

    return make


@dataclass(frozen=True, slots=True)
class _Loaded:
    info: AdapterInfo
    made: list[tuple[Layer, Any]]


class AdapterSlots:
    """Adapters by name. Call it only on the engine's thread, between two steps."""

    def __init__(self, layers: Mapping[str, Layer], config: EngineConfig, elsewhere: Collection[str]) -> None:
        self._elsewhere = {_tail(path) for path in elsewhere}
        self._layers, self._max_rank, self._max_bytes = layers, config.max_lora_rank, config.lora_bytes
        self._tables = {id(layer.table): layer.table for layer in layers.values()}.values()
        self._by_tail = {_tail(path): layer for path, layer in layers.items()}
        self._loaded: dict[str, _Loaded] = {}
        self._free = list(range(config.max_loras, 0, -1))
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._holders: Counter[str] = Counter()
        self._prepared: _Loaded | None = None
        self._divided: dict[int, Factors] = {}
        self.num_swaps = 0

    def load(self, name: str, folder: Path, *, replace: bool = False) -> AdapterInfo:
        """Load an adapter. Raises InvalidRequest if it is not supported."""
        info = self.prepare(name, folder, replace)
        self.commit()
        return info

    def prepare(self, name: str, folder: Path, replace: bool) -> AdapterInfo:
        """Read an adapter for ``commit`` or ``discard``. Raises InvalidRequest if it is not supported."""
        old = self._loaded.get(name)
        if old is not None and not replace:
            raise InvalidRequest(f"adapter names must differ, got {name!r} twice; unload {name!r} first")
        left = self._max_bytes - self.nbytes + (0 if old is None else old.info.nbytes)
        file = read_adapter(folder, max_bytes=left)
        if file.rank > self._max_rank:
            raise InvalidRequest(
                f"the rank of {folder} must be at most {self._max_rank}, got {file.rank}; start the engine "
                f"with max_lora_rank {file.rank}"
            )
        made: list[tuple[Layer, Any]] = []
        nbytes, divided = 0, dict[int, Factors]()
        for path, factors in file.layers.items():
            if (layer := self._layers.get(path) or self._by_tail.get(_tail(path))) is None:
                if _tail(path) in self._elsewhere:
                    continue
                raise InvalidRequest(
                    f"{folder} must have factors of the model's linear layers only, got {path}; embeddings, "
                    "output heads and layers of images cannot be adapted"
                )
            own = layer.own(path, factors)
            each, size = layer.made(own)
            if own.magnitude is not None and layer.cut is not None and layer.cut.of_inputs:
                divided[len(made)] = own
            made.append((layer, each))
            nbytes += size
        if nbytes > left:
            raise InvalidRequest(
                f"{folder} must fit into the {left} free bytes of lora_memory, got {nbytes}; unload an "
                "adapter, or start the engine with more lora_memory"
            )
        info = AdapterInfo(name, str(folder), file.digest, file.rank, nbytes)
        self._prepared, self._divided = _Loaded(info, made), divided
        return info

    def squares(self) -> list[Floats]:
        """Return sums of squares over this rank's inputs, for DoRA layers whose inputs ranks divide."""
        assert self._prepared is not None, "prepare comes first"
        made = self._prepared.made
        return [np.array(made[i][0].squares(factors)) for i, factors in self._divided.items()]

    def commit(self, squares: Sequence[Floats] = ()) -> None:
        assert self._prepared is not None, "prepare comes first"
        made = self._prepared.made
        for (i, factors), total in zip(self._divided.items(), squares, strict=True):
            made[i] = made[i][0], made[i][0].made(factors, mx.array(total))[0]
        name = self._prepared.info.name
        if name in self._loaded:
            self.unload(name)
        self._loaded[name] = self._prepared
        self.discard()

    def discard(self) -> None:
        self._prepared, self._divided = None, {}

    def unload(self, name: str) -> None:
        """Unload an unused adapter. Raises NotFound for an unknown name."""
        self.info(name)
        assert not self._holders[name], f"adapter {name} is held"
        del self._loaded[name], self._holders[name]
        if (slot := self._slots.pop(name, None)) is not None:
            self._clear(slot)
            self._free.append(slot)

    def info(self, name: str) -> AdapterInfo:
        """Return information about an adapter. Raises NotFound for an unknown name."""
        if name not in self._loaded:
            raise NotFound(f"no adapter is called {name!r}; load it first")
        return self._loaded[name].info

    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(loaded.info for loaded in self._loaded.values())

    def hold(self, name: str) -> bool:
        """Reserve a slot for an adapter until ``release``; return False if no slot is free."""
        if name not in self._slots:
            if (slot := self._take_slot()) is None:
                return False
            for layer, made in self._loaded[name].made:
                layer.table.put(slot, layer.part, made)
            self._slots[name] = slot
            self.num_swaps += 1
        self._slots.move_to_end(name)
        self._holders[name] += 1
        return True

    def release(self, name: str) -> None:
        assert self._holders[name] > 0, f"adapter {name} is held by nothing"
        self._holders[name] -= 1

    def slot(self, name: str) -> int:
        return self._slots[name]

    @property
    def held(self) -> tuple[str, ...]:
        return tuple(name for name in self._slots if self._holders[name])

    @property
    def nbytes(self) -> int:
        return sum(loaded.info.nbytes for loaded in self._loaded.values())

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        idle = next((name for name in self._slots if not self._holders[name]), None)
        if idle is None:
            return None
        slot = self._slots.pop(idle)
        self._clear(slot)
        return slot

    def _clear(self, slot: int) -> None:
        for table in self._tables:
            table.clear(slot)


def _tail(path: str) -> str:
    return next((path.removeprefix(root) for root in _TEXT_MODELS if path.startswith(root)), path)


def _observed_groups(model: Any) -> list[tuple[Any, ...]] | None:
    try:
        from ..native.merged import observe
    except ImportError:
        return []
    groups = observe(lambda: model(mx.array([[0, 1]]))).groups
    return [group for group in groups if len(group) <= MAX_TABLE_LAYERS]


def adapter_slots(
    config: EngineConfig,
    model: Module,
    rows: RowInputs,
    backend: AttentionBackend,
    own: RankLayers,
) -> AdapterSlots | None:
    if not config.lora_bytes:
        return None
    make_table = table_maker(backend, num_slots=config.max_loras, max_rank=config.max_lora_rank)
    groups = None if backend.adapter_tables is None else _observed_groups(model)
    layers = adapt_layers(model, rows, make_table, native=backend.has_model_ops, groups=groups, cuts=own.cuts)
    return AdapterSlots(layers, config, own.elsewhere)


def load_modules(config: EngineConfig, adapters: Adapters) -> None:
    model_names = config.served_model_name or (served_name(config.model),)
    for name, folder in config.lora_paths.items():
        if name in model_names:
            raise InvalidConfig(
                f"lora_modules must differ from the model's name, got {name!r}; choose another name"
            )
        try:
            adapters.load(name, folder)
        except InvalidRequest as error:
            raise InvalidConfig(f"lora_modules: {error}") from None
