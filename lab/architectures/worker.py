"""Process that examines architectures one by one: ``python -m ...worker NAME ...``.

The process prints a line of JSON after each architecture. So a model that hangs or crashes affects only its
own line (survey.py reads the lines).
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict


def main(backend: str, names: list[str]) -> None:
    """Examine the architectures ``names``; what model code prints goes to standard error."""
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
