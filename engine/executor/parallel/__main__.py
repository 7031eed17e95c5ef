"""A rank other than 0: ``python -m octavo.engine.executor.parallel FD``, started by rank 0."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection

from ...api.errors import OctavoError
from .group import RankGroup, ring_file
from .runner import follow


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    config = pickle.loads(connection.recv_bytes())
    rank = os.environ["MLX_RANK"]
    try:
        with ring_file(os.environ["OCTAVO_RING"]) as variables:
            group = RankGroup({"MLX_RANK": rank, **variables}, [connection])
        follow(config, group)
    except OctavoError as error:
        print(f"octavo: rank {rank}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the ring's threads may wait for a dead neighbour
