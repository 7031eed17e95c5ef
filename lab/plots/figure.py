from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.engine.api.errors import InvalidConfig


def require_matplotlib(path: Path | None) -> None:
    """Raise InvalidConfig if a requested picture cannot be drawn or written."""
    if path is None:
        return
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise InvalidConfig(
            "--plot needs matplotlib, which is not installed; run `pip install matplotlib`"
        ) from None
    kinds = importlib.import_module("matplotlib.figure").Figure().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise InvalidConfig(
            f"--plot {path}: a picture must be a .png or .svg file, got {path.suffix}; change the name"
        )
    if not path.parent.is_dir():
        raise InvalidConfig(f"--plot {path}: there is no folder {path.parent}; make it first")


@contextmanager
def picture(
    path: Path,
    *,
    columns: int = 1,
    rows: int = 1,
    share_y: bool = False,
    size: tuple[float, float] | None = None,
    dpi: int = 120,
) -> Iterator[list[Any]]:
    """Yield axes, row by row; then write the picture, ``size`` in inches, to ``path``."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    default = (7.0 if columns == 1 else 4.8 * columns, 4.2 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size or default, squeeze=False, sharey=share_y)
    try:
        yield list(axes.flat)
        figure.tight_layout()
        figure.savefig(path, dpi=dpi)
    finally:
        pyplot.close(figure)


def log_ticks(axis: Any, values: list[int]) -> None:
    """Make an axis logarithmic and label ``values`` as plain numbers."""
    axis.set_xscale("log")
    axis.set_xticks(values, [f"{value:,}" for value in values])
    axis.minorticks_off()
