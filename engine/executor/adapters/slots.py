"""The adapters of a loaded model, and the slots of those in use.

Loaded adapters are kept in memory within a limit. An adapter of a running request has a slot. If there are
more adapters than slots, the least recently used one without requests loses its slot.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx.nn.layers.base import Module

from ...api.config import EngineConfig
from ...api.engine_info import AdapterInfo
from ...api.errors import InvalidConfig, InvalidRequest, NotFound
from ..row_inputs import RowInputs
from .files import read_adapter
from .layers import Layer, adapt_layers
from .tables import table_maker


@dataclass(frozen=True, slots=True)
class _Loaded:
    info: AdapterInfo
    made: tuple[tuple[Layer, Any], ...]


class AdapterSlots:
    """Adapters by name; call it only on the engine's thread, between two steps.

    layers      layers of the model that can be adapted, by name
    max_rank    largest rank of an adapter
    max_bytes   memory limit of all loaded adapters together
    """

    def __init__(self, layers: Mapping[str, Layer], *, num_slots: int, max_rank: int, max_bytes: int) -> None:
        self._layers, self._max_rank, self._max_bytes = layers, max_rank, max_bytes
        self._tables = {id(layer.table): layer.table for layer in layers.values()}.values()
        self._loaded: dict[str, _Loaded] = {}
        self._free = list(range(num_slots, 0, -1))
        self._slots: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._holders: Counter[str] = Counter()
        self.num_swaps = 0  # number of times an adapter was put into a slot

    def load(self, name: str, folder: Path, *, replace: bool = False) -> AdapterInfo:
        """Load an adapter; InvalidRequest, with no change, if it cannot be served. ``replace`` allows
        replacing an unused adapter of this name, whose bytes count as free."""
        old = self._loaded.get(name)
        if old is not None and not replace:
            raise InvalidRequest(f"adapter names must differ, got {name!r} twice; unload the other one first")
        left = self._max_bytes - self.nbytes + (0 if old is None else old.info.nbytes)
        file = read_adapter(folder, max_bytes=left)
        if file.rank > self._max_rank:
            raise InvalidRequest(
                f"the rank of {folder} must be at most {self._max_rank}, got {file.rank}; start the engine "
                f"with max_lora_rank {file.rank}"
            )
        made, nbytes = [], 0
        for path, factors in file.layers.items():
            if (layer := self._layers.get(path)) is None:
                raise InvalidRequest(
                    f"{folder} must have factors of the model's linear layers alone, got {path}; embeddings "
                    "and output heads cannot be adapted"
                )
            each, size = layer.made(path, factors)
            made.append((layer, each))
            nbytes += size
        if nbytes > left:
            raise InvalidRequest(
                f"{folder} must fit the {left} bytes that are left of lora_memory, got {nbytes}; unload an "
                "adapter, or start the engine with more"
            )
        if old is not None:
            self.unload(name)
        info = AdapterInfo(name, str(folder), file.digest, file.rank, nbytes)
        self._loaded[name] = _Loaded(info, tuple(made))
        return info

    def unload(self, name: str) -> None:
        """Unload an unused adapter. Raises NotFound for an unknown name."""
        self.info(name)
        assert not self._holders[name], f"adapter {name} is held"
        del self._loaded[name], self._holders[name]
        if (slot := self._slots.pop(name, None)) is not None:
            self._clear(slot)
            self._free.append(slot)

    def info(self, name: str) -> AdapterInfo:
        """Return a loaded adapter; NotFound if none has this name."""
        if name not in self._loaded:
            raise NotFound(f"no adapter is called {name!r}; load it first")
        return self._loaded[name].info

    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(loaded.info for loaded in self._loaded.values())

    def hold(self, name: str) -> bool:
        """Keep an adapter in a slot until ``release``; return False if others hold all slots."""
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
        """End one ``hold``; the adapter stays in its slot until another one needs it."""
        assert self._holders[name] > 0, f"adapter {name} is held by nothing"
        self._holders[name] -= 1

    def slot(self, name: str) -> int:
        """Return the slot of a held adapter."""
        return self._slots[name]

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the adapters that running requests hold."""
        return tuple(name for name in self._slots if self._holders[name])

    @property
    def nbytes(self) -> int:
        """Bytes of all loaded adapters."""
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


def load_adapters(
    config: EngineConfig, model: Module, rows: RowInputs, *, native: bool
) -> AdapterSlots | None:
    """Adapt the model's layers and load ``lora_modules``; None if the configuration has no adapters. Raises
    InvalidConfig for an adapter that cannot be served. ``rows``: inputs of the model's rows; ``native``:
    native kernels compute the layers."""
    if not config.lora_bytes:
        return None
    make_table = table_maker(native=native, num_slots=config.max_loras, max_rank=config.max_lora_rank)
    layers = adapt_layers(model, rows, make_table, native=native)
    slots = AdapterSlots(
        layers, num_slots=config.max_loras, max_rank=config.max_lora_rank, max_bytes=config.lora_bytes
    )
    for name, folder in config.lora_paths.items():
        try:
            slots.load(name, folder)
        except InvalidRequest as error:
            raise InvalidConfig(f"lora_modules: {error}") from None
    return slots
