from __future__ import annotations

import argparse

from octavo.kernels import page_format

from ..kernels.kernel_timings import WEIGHT_KINDS


def format_names(text: str) -> list[str]:
    """Return page formats from a text such as "bf16,fp4", for argparse."""
    try:
        return list(dict.fromkeys(page_format(name.strip()).name for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def weight_names(text: str) -> list[str]:
    """Return kinds of weights from a text such as "bf16,int4", for argparse."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in names if name not in WEIGHT_KINDS]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not a kind of weights; use some of {', '.join(WEIGHT_KINDS)}"
        )
    return names
