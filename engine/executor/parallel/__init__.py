"""Several processes (ranks) that compute one model.

With tensor parallelism, a rank has some heads and columns of every layer; with pipeline parallelism, it has
some layers. Rank 0 has the scheduler, the page tables, sampling and the servers. It sends each step's
``Batch`` to the other ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from typing import NoReturn

from ...api.config import EngineConfig
from ...api.errors import InvalidConfig, OctavoError
from ..base import ModelRunner
from ..load.page_loss import ScoreText


def load_ranks(config: EngineConfig, score: ScoreText) -> ModelRunner:
    """Load the model in ``config.num_ranks`` processes. Returns in rank 0 only."""
    if is_follower(config):
        follow_leader()
    from .runner import load_leading_runner  # imports MLX

    return load_leading_runner(config, score)


def launched_rank() -> str | None:
    return os.environ.get("MLX_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))


def is_follower(config: EngineConfig) -> bool:
    """Return whether ``mlx.launch`` or ``mpirun`` gave this process a rank above 0. Raises InvalidConfig."""
    is_first = launched_rank() in (None, "0")
    if not is_first and config.num_ranks == 1:
        if "MLX_RANK" not in os.environ:
            return False
        raise InvalidConfig(
            "tensor_parallel or pipeline_parallel must be the number of hosts of mlx.launch, got 1 of each; "
            "set one of them"
        )
    return not is_first


def follow_leader() -> NoReturn:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = 0
    try:
        from .runner import follow

        follow()
    except Exception as error:
        if not isinstance(error, OctavoError):
            traceback.print_exc()
        print(f"octavo: rank {launched_rank()}: {error}", file=sys.stderr)
        code = 1
    sys.stderr.flush()
    os._exit(code)  # the ring's threads may wait for a dead neighbour
