"""The ranks of a group: MLX's ring for arrays, and a connection from rank 0 to each other rank.

mlx-lm's ``shard`` splits the model. Layers that communicate become plain linear layers, and ``RankSum``
adds their outputs. So native kernels and quantization work on each rank.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers import distributed
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from octavo.kernels.metadata import Ints

from ...api.config import EngineConfig
from ...api.errors import InvalidConfig, InvalidRequest
from ...memory.sizing import Sizing
from ..adapt.output_head import module_at
from ..adapters.files import Factors
from ..adapters.layers import RankLayers
from ..batch import Batch
from ..cache_layout import CacheLayout
from ..model_runner import PagedRunner
from ..row_inputs import RowInputs
from ..sampling.sampler import SampleState

_SPLIT_OUTPUTS = (distributed.AllToShardedLinear, distributed.QuantizedAllToShardedLinear)
_SPLIT_INPUTS = (distributed.ShardedToAllLinear, distributed.QuantizedShardedToAllLinear)


class RankSum(Module):
    """Linear layer over part of the inputs; its results are summed over the ranks.

    MLX's own sum is not used, because it depends on a row's position in the batch.
    """

    def __init__(self, inner: Module, bias: mx.array | None, group: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inner = inner
        self._group = group
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        y = self.inner(x)
        if self._group.size() == 2:
            y = mx.distributed.all_sum(y, group=self._group)
        else:
            parts = mx.distributed.all_gather(y[None], group=self._group)
            y = parts[0]
            for part in parts[1:]:
                y = y + part
        return y + self["bias"] if "bias" in self else y


class Share(NamedTuple):
    """Part of a layer's inputs or outputs that this rank has. Cuts an adapter's factors likewise."""

    of_inputs: bool
    segments: Any
    group: Any

    def __call__(self, factors: Factors) -> Factors:
        if not self.of_inputs:
            magnitude = factors.magnitude
            return replace(
                factors,
                b=self._part(factors.b),
                magnitude=None if magnitude is None else self._part(magnitude),
            )
        if factors.magnitude is not None:
            raise InvalidRequest(
                "adapters must have no magnitudes of layers that tensor_parallel splits by inputs, got DoRA; "
                "use LoRA, or serve in one process"
            )
        return replace(factors, a=self._part(factors.a))

    def _part(self, x: mx.array) -> mx.array:
        try:
            part: mx.array = distributed._shard({"": x}, lambda *_: (-1, self.segments), self.group)[""]
        except ValueError:
            return x
        return part


def shard(model: Any, group: Any) -> dict[str, Share]:
    """Reduce the model to this rank's part; return the shares of split layers.

    Raises InvalidConfig if the model cannot be split.
    """
    kind = type(model).__module__.rpartition(".")[2]
    text = model if hasattr(model, "shard") else getattr(model, "language_model", None)
    if not hasattr(text, "shard"):
        raise InvalidConfig(
            f"tensor_parallel must be 1 for {kind} models, which mlx-lm cannot split, got {group.size()}"
        )
    _drop_gradients()
    try:
        with _recorded() as recorded:
            text.shard(group)
    except (ValueError, AssertionError) as error:
        raise InvalidConfig(
            f"tensor_parallel must divide the heads and widths of {kind} models, got {group.size()}: {error}"
        ) from error
    modules = list(model.named_modules())
    if group.size() > 2 and any(getattr(module, "sharding_group", None) for _, module in modules):
        raise InvalidConfig(
            f"tensor_parallel must be at most 2 for {kind} models, because a row's bits would depend on its "
            f"batch, got {group.size()}"
        )
    for path, module in modules:
        if (plain := _as_plain(module, group)) is not None:
            parent, _, name = path.rpartition(".")
            setattr(module_at(model, parent), name, plain)
    shares = {id(weight): share for weight, share in recorded}
    return {path: shares[key] for path, module in modules if (key := id(module.get("weight"))) in shares}


@contextmanager
def _recorded() -> Iterator[list[tuple[mx.array, Share]]]:
    recorded: list[tuple[mx.array, Share]] = []
    split = distributed._shard

    def recording(parameters: Any, predicate: Any, group: Any) -> Any:
        parts = split(parameters, predicate, group)
        whole = parameters.get("weight")
        if isinstance(whole, mx.array) and (how := predicate("weight", whole)) is not None:
            axis, segments = how if isinstance(how, tuple) else (how, 1)
            recorded.append((parts["weight"], Share(axis % whole.ndim == whole.ndim - 1, segments, group)))
        return parts

    distributed._shard = recording
    try:
        yield recorded
    finally:
        distributed._shard = split


def _drop_gradients() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, "sum_gradients"):
            module.sum_gradients = _without_gradients  # type: ignore[attr-defined]


def _without_gradients(_group: Any) -> Any:
    return lambda x: x


def _as_plain(module: Any, group: Any) -> Module | None:
    kind = type(module)
    if kind not in _SPLIT_OUTPUTS + _SPLIT_INPUTS:
        return None
    layer: Any
    if "scales" in module:
        layer = QuantizedLinear(32, 1, bias=False, group_size=32)
        layer.group_size, layer.bits, layer.mode = module.group_size, module.bits, module.mode
        layer.scales = module.scales
        del layer["biases"]
        if module.get("biases") is not None:
            layer.biases = module.biases
    else:
        layer = Linear(1, 1, bias=False)
    layer.weight = module.weight
    bias = module.get("bias")
    plain: Module = layer
    if kind in _SPLIT_INPUTS:
        return RankSum(layer, bias, group)
    if bias is not None:
        layer.bias = bias
    return plain


END_GRACE_S = 2.0  # seconds for rank 0 to report its own error
STOP_S = 10.0
_started = False  # MLX makes only one group per process


class RankGroup:
    def __init__(self, variables: Mapping[str, str], steps: Sequence[Connection[Any, Any]]) -> None:
        with _environment(variables):
            self._mlx = mx.distributed.init(strict=True, backend="ring")
        self.rank, self.size = self._mlx.rank(), self._mlx.size()
        self.steps = tuple(steps)

    def tell(self, message: Any) -> None:
        for connection in self.steps:
            connection.send(message)

    def answers(self) -> list[Any]:
        return [connection.recv() for connection in self.steps]

    def shard(self, model: Any) -> dict[str, Share]:
        return shard(model, self._mlx)

    def smallest(self, value: int) -> int:
        return int(np.array(mx.distributed.all_min(mx.array([value]), group=self._mlx))[0])

    def total(self, value: int) -> int:
        return int(np.array(mx.distributed.all_sum(mx.array([value], mx.int64), group=self._mlx))[0])

    def send(self, values: Ints, rank: int) -> None:
        mx.eval(mx.distributed.send(mx.array(values), rank, group=self._mlx))

    def receive(self, shape: tuple[int, ...], rank: int) -> Ints:
        return np.array(mx.distributed.recv(shape, mx.int32, rank, group=self._mlx))


class Shard:
    """A rank's part of each layer, in tensor parallel."""

    gives_logits = True
    groups: Sequence[int] | None = None
    layers = RankLayers()

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.rank = group.rank
        self.row_inputs = RowInputs()

    def smallest(self, value: int) -> int:
        return self._group.smallest(value)

    def split(self, model: Any) -> None:
        self.layers = RankLayers(self._group.shard(model))

    def layouts(self, found: CacheLayout) -> tuple[CacheLayout, CacheLayout]:
        return found, found

    def slot_bytes(self, own: int) -> int:
        return own

    def own(
        self, found: CacheLayout, whole: CacheLayout, size: Sizing, sized: Callable[[CacheLayout], Sizing]
    ) -> tuple[CacheLayout, Sizing]:
        del found, sized
        return whole, size

    def receive(self, batch: Batch) -> Batch:
        return batch

    def follow(self, runner: PagedRunner, batch: Batch, greedy: SampleState) -> tuple[int, ...]:
        return runner.run(batch, [greedy] * len(batch.sample_rows)).failed_rows


class LeadingGroup(RankGroup):
    """Rank 0, which starts the other ranks on this machine and ends with them."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the other ranks. Raises InvalidConfig if this process had a group before."""
        global _started
        if _started:
            raise InvalidConfig(
                f"{config.ranks_setting} must be 1 in a process that has used a group of ranks, because MLX "
                f"keeps the first group, got {config.num_ranks}; start another process"
            )
        _started = True
        self._ending = False
        self._ranks: list[subprocess.Popen[bytes]] = []
        addresses = json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(config.num_ranks)])
        steps = []
        for rank in range(1, config.num_ranks):
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "octavo.engine.executor.parallel", str(theirs.fileno())]
                variables = os.environ | {"MLX_RANK": str(rank), "OCTAVO_RING": addresses}
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, env=variables, pass_fds=(theirs.fileno(),)
                )
            self._ranks.append(process)
            steps.append(Connection(ours.detach()))
            steps[-1].send_bytes(pickle.dumps(config))
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        with ring_file(addresses) as variables:
            super().__init__({"MLX_RANK": "0", **variables}, steps)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        time.sleep(END_GRACE_S)
        if not self._ending:
            print(
                f"octavo: rank {rank} has exited with status {code}, so all ranks stop",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    def close(self) -> None:
        self._ending = True
        for connection in self.steps:
            connection.close()
        for process in self._ranks:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def ring_file(addresses: str) -> Iterator[dict[str, str]]:
    read, write = os.pipe()
    with ExitStack() as stack:
        stack.callback(os.close, read)
        with os.fdopen(write, "w") as file:
            file.write(addresses)
        yield {"MLX_HOSTFILE": f"/dev/fd/{read}"}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
