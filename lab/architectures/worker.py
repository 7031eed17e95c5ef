"""Process that examines architectures and prints a line of JSON for each."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict


def main(backend: str, names: list[str]) -> None:
    from octavo.kernels.backends import choose_backend, set_up_device

    from .examine import examine

    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    choice = choose_backend(backend)
    set_up_device()
    for name in names:
        print(json.dumps(asdict(examine(name, choice))), file=lines)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
