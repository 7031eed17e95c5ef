"""The ranks of a group: a back end of MLX for arrays, and TCP connections from rank 0 to each other rank.

A rank has one connection for steps and one that closes when a process ends. MLX sends their key to all
ranks. A launcher's variables name the back end. Without them, rank 0 starts the others on this machine.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from octavo.kernels.metadata import Ints

from ...api.config import EngineConfig
from ...api.errors import InvalidConfig, OctavoError

END_GRACE_S = 2.0  # seconds for a process to report its error
STOP_S = 10.0
KEY_BYTES = 32
NAME_BYTES = 64
_BACKENDS = {
    "MLX_HOSTFILE": ("ring", "list two or more hosts that reach each other on the listed ports"),
    "MLX_JACCL_COORDINATOR": ("jaccl", "it needs RDMA over Thunderbolt; use mlx.launch --backend ring"),
    "OMPI_COMM_WORLD_RANK": ("mpi", "set MLX_MPI_LIBNAME to the name of Open MPI's library, as libmpi.so.40"),
}
"""Back end and remedy by the variable of the launcher that names it."""
KEEPALIVE_IDLE_S, KEEPALIVE_PROBE_S, NUM_PROBES = 15, 5, 3
_started = False  # MLX makes only one group per process


class RankGroup:
    def __init__(self) -> None:
        self.mlx = _joined()
        self.rank, self.size = self.mlx.rank(), self.mlx.size()

    def _connect(self) -> None:
        listed = _hosts_of_ring()
        self.hosts = listed or self._host_names()
        self.num_here = self.hosts.count(self.hosts[self.rank])
        are_here = self.num_here == self.size
        coordinator = os.environ.get("MLX_JACCL_COORDINATOR", "").rpartition(":")[0]
        address = "127.0.0.1" if are_here else coordinator or self.hosts[0]
        if self.rank:
            port, *key = self._sum([0] * (1 + KEY_BYTES))
            try:
                pair = [Client((address, port), authkey=bytes(key)) for _ in range(2)]
            except OSError as error:
                raise InvalidConfig(
                    f"rank 0 must be reachable at {address}, got {error}; let its host name lead to it"
                ) from error
            for is_watched, connection in enumerate(pair):
                connection.send((is_watched, self.rank))
            found = [[connection] for connection in pair]
        else:
            new = secrets.token_bytes(KEY_BYTES)
            own = address if are_here or listed else "0.0.0.0"  # its own name may lead to the loopback
            with Listener((own, 0), backlog=2 * self.size, authkey=new) as listener:
                self._sum([int(listener.address[1]), *new])
                accepted = [listener.accept() for _ in range(2 * (self.size - 1))]
            named = sorted((connection.recv(), index) for index, connection in enumerate(accepted))
            ordered = [accepted[index] for _, index in named]
            found = [ordered[: self.size - 1], ordered[self.size - 1 :]]
        for connection in (*found[0], *found[1]):
            _set_options(connection)
        self.steps, self.watched = found

    def _host_names(self) -> list[str]:
        name = socket.gethostname().encode()[:NAME_BYTES].ljust(NAME_BYTES)
        rows = np.array(mx.distributed.all_gather(mx.array([list(name)]), group=self.mlx))
        return [bytes(row.tolist()).decode().strip() for row in rows]

    def tell(self, message: Any) -> None:
        for connection in self.steps:
            connection.send(message)

    def answers(self) -> list[Any]:
        """Return each other rank's answer. Raises the first answer that is an OctavoError."""
        answers = [connection.recv() for connection in self.steps]
        for rank, answer in enumerate(answers, 1):
            if isinstance(answer, OctavoError):
                raise type(answer)(f"rank {rank}: {answer}")
        return answers

    def smallest(self, value: int) -> int:
        return int(np.array(mx.distributed.all_min(mx.array([value]), group=self.mlx))[0])

    def total(self, value: int) -> int:
        (total,) = self._sum([value])
        return total

    def _sum(self, values: list[int]) -> list[int]:
        sums = mx.distributed.all_sum(mx.array(values, mx.int64), group=self.mlx)
        return list(map(int, np.array(sums)))

    def send(self, values: Ints, rank: int) -> None:
        mx.eval(mx.distributed.send(mx.array(values), rank, group=self.mlx))

    def receive(self, shape: tuple[int, ...], rank: int) -> Ints:
        return np.array(mx.distributed.recv(shape, mx.int32, rank, group=self.mlx))


class FollowingGroup(RankGroup):
    def __init__(self) -> None:
        super().__init__()
        self._connect()
        self._ended, self._is_leaving = threading.Event(), False
        threading.Thread(target=self._watch, daemon=True).start()

    def leave(self) -> None:
        self._ended.wait()
        self._is_leaving = True
        _finalize()

    def _watch(self) -> None:
        if _says_end(self.watched[0]):
            self._ended.set()
        elif self.rank == 1:
            print("octavo: rank 0 has exited, so all ranks stop", file=sys.stderr, flush=True)
        time.sleep(END_GRACE_S)
        if not self._is_leaving:
            os._exit(1)


class LeadingGroup(RankGroup):
    def __init__(self, config: EngineConfig) -> None:
        """Start the other ranks, or join those of ``mlx.launch``. Raises InvalidConfig."""
        global _started
        if _started:
            raise InvalidConfig(
                f"{config.ranks_setting} must be 1 in a process that has used a group of ranks, because MLX "
                f"keeps the first group, got {config.num_ranks}; start another process"
            )
        _started = True
        self._ending = False
        self._ranks: list[subprocess.Popen[bytes]] = []
        if not {"MLX_RANK", "OMPI_COMM_WORLD_RANK"} & os.environ.keys():
            with _environment(config.num_ranks) as variables:
                for rank in range(1, config.num_ranks):
                    self._start(rank, variables)
                super().__init__()
                self._connect()
            return
        super().__init__()
        if self.size != config.num_ranks:
            raise InvalidConfig(
                f"{config.ranks_setting} must be the number of launched ranks, {self.size}, got "
                f"{config.num_ranks}; change one of the two"
            )
        self._connect()
        for rank, connection in enumerate(self.watched, start=1):
            self._watch(functools.partial(self._end_of, rank, connection))

    def _start(self, rank: int, variables: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "octavo.engine.executor.parallel"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=os.environ | variables | {"MLX_RANK": str(rank)}
        )
        self._ranks.append(process)
        self._watch(lambda: f"rank {rank} has exited with status {process.wait()}")

    def _end_of(self, rank: int, connection: Connection[Any, Any]) -> str:
        _says_end(connection)
        return f"rank {rank} on {self.hosts[rank]} has exited"

    def _watch(self, wait: Callable[[], str]) -> None:
        threading.Thread(target=self._end_with, args=(wait,), daemon=True).start()

    def _end_with(self, wait: Callable[[], str]) -> None:
        how = wait()
        if not self._ending:
            print(f"octavo: {how}, so all ranks stop", file=sys.stderr, flush=True)
            self._say_end()
            time.sleep(END_GRACE_S)
            os._exit(1)

    def _say_end(self) -> None:
        for connection in self.watched:
            with suppress(OSError):
                connection.send("end")

    def close(self, *, has_failed: bool = False) -> None:
        self._ending = True
        self._say_end()
        for connection in self.steps:
            connection.close()
        if not has_failed:
            _finalize()
        for process in self._ranks:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _backend() -> str:
    return next((name for variable, (name, _) in _BACKENDS.items() if variable in os.environ), "any")


def _finalize() -> None:
    if _backend() == "mpi":  # stops all ranks if one exits without this call, in which all wait for all
        ctypes.CDLL(None).MPI_Finalize()


def _joined() -> mx.distributed.Group:
    backend = _backend()
    try:
        return mx.distributed.init(strict=True, backend=backend)
    except RuntimeError as error:
        remedies = dict(_BACKENDS.values())
        raise InvalidConfig(
            f"the launcher's back end must be one that MLX can start here, got {backend} ({error}); "
            f"{remedies.get(backend, 'use mlx.launch --backend ring')}"
        ) from error


def _hosts_of_ring() -> list[str]:
    if (path := os.environ.get("MLX_HOSTFILE")) is None:
        return []
    return [own[0].rpartition(":")[0] for own in json.loads(Path(path).read_text())]


def _says_end(connection: Connection[Any, Any]) -> bool:
    try:
        return bool(connection.recv())
    except (EOFError, OSError):
        return False


def _set_options(connection: Connection[Any, Any]) -> None:
    idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    options = {"TCP_NODELAY": 1, idle: KEEPALIVE_IDLE_S, "TCP_KEEPINTVL": KEEPALIVE_PROBE_S}
    options["TCP_KEEPCNT"] = NUM_PROBES
    with socket.socket(fileno=os.dup(connection.fileno())) as tcp:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextmanager
def _environment(num_ranks: int) -> Iterator[dict[str, str]]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([[f"127.0.0.1:{port}"] for port in _free_ports(num_ranks)], file)
        file.flush()
        variables = {"MLX_HOSTFILE": file.name, "MLX_RANK": "0"}
        os.environ.update(variables)
        try:
            yield variables
        finally:
            for name in variables:
                del os.environ[name]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
