from __future__ import annotations

from pathlib import Path

from octavo.engine.api.engine_info import AdapterInfo
from octavo.engine.api.errors import InvalidRequest, NotFound


class FakeAdapters:
    """``Adapters`` without a model; the digest is the folder's name, and eviction is LRU."""

    def __init__(self, num_slots: int = 2) -> None:
        self._infos: dict[str, AdapterInfo] = {}
        self._free = list(range(1, num_slots + 1))
        self.slots: dict[str, int] = {}
        self.holders: dict[str, int] = {}

    def load(self, name: str, folder: Path, *, replace: bool = False) -> AdapterInfo:
        if name in self._infos and not replace:
            raise InvalidRequest(f"adapter names must differ, got {name!r} twice; unload {name!r} first")
        self._infos[name] = AdapterInfo(name, str(folder), folder.name.encode(), 4, 100)
        return self._infos[name]

    def unload(self, name: str) -> None:
        self.info(name)
        assert not self.holders.get(name)
        del self._infos[name]
        if name in self.slots:
            self._free.append(self.slots.pop(name))

    def info(self, name: str) -> AdapterInfo:
        if name not in self._infos:
            raise NotFound(f"no adapter is called {name!r}; load it first")
        return self._infos[name]

    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(self._infos.values())

    def hold(self, name: str) -> bool:
        if name not in self.slots:
            if not self._free:
                idle = next((each for each in self.slots if not self.holders.get(each)), None)
                if idle is None:
                    return False
                self._free.append(self.slots.pop(idle))
            self.slots[name] = self._free.pop()
        self.slots[name] = self.slots.pop(name)
        self.holders[name] = self.holders.get(name, 0) + 1
        return True

    def release(self, name: str) -> None:
        self.holders[name] -= 1
        assert self.holders[name] >= 0

    def slot(self, name: str) -> int:
        assert self.holders[name]
        return self.slots[name]
