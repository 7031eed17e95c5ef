"""``octavo bench append``: storing the next token's K/V, in pages and by growing dense arrays."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, get_args

from tqdm import tqdm

from octavo.kernels import FORMATS_WITH_KERNELS
from octavo.kernels.backends import BackendName, choose_backend
from octavo.kernels.interface import AttentionBackend

from ..api.errors import InvalidConfig
from ..arguments.usage import counts, positive
from ..executor.append_timings import (
    DENSE_ROW_BYTES,
    AppendTiming,
    dense_bytes,
    time_concatenation,
    time_mlx_lm,
    time_pages,
    use_cpu_without_metal,
)
from ..memory.budget import available_memory, format_size
from .arguments import format_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", choices=get_args(BackendName), default="auto", help="where pages are")
    add("--threads", type=positive, metavar="N", help="CPU threads (all this process may use)")
    add(
        "--contexts",
        type=counts,
        default="128,512,2048,8192,32768",
        metavar="N,N",
        help="tokens that are stored already",
    )
    add(
        "--formats",
        type=format_names,
        default=",".join(FORMATS_WITH_KERNELS),
        metavar="F,F",
        help="page formats",
    )
    add("--page-size", type=positive, default=32, metavar="N", help="positions per page")
    add(
        "--tokens",
        type=positive,
        default=256,
        metavar="N",
        help="tokens stored one after another, into pages and mlx-lm's cache, which grows once in 256",
    )
    add("--concatenated", type=positive, default=8, metavar="N", help="tokens stored by concatenation")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, return what --json prints."""
    _check_memory(max(args.contexts) + max(args.tokens, args.concatenated))
    use_cpu_without_metal()
    try:
        choice = choose_backend(args.backend, args.threads)
    except ValueError as error:
        raise InvalidConfig(str(error)) from error
    pages: dict[str, dict[str, Any]] = {}
    dense: dict[str, dict[str, Any]] = {"concatenate": {}, "mlx_lm": {}}
    refused: dict[str, str] = {}
    with tqdm(total=len(args.contexts) * (len(args.formats) + 2), unit="case", disable=None) as bar:
        for context in args.contexts:
            for name, timing in _time_formats(choice.backend, context, args, refused):
                pages.setdefault(name, {})[str(context)] = _row(timing)
                bar.update()
            timing = time_concatenation(context=context, tokens=args.concatenated)
            dense["concatenate"][str(context)] = _row(timing)
            bar.update()
            dense["mlx_lm"][str(context)] = _row(time_mlx_lm(context=context, tokens=args.tokens))
            bar.update()
    print(f"{choice.backend.name}: {choice.reason}")
    for reason in refused.values():
        print(f"not measured: {reason}")
    result = {
        "bench": "append",
        "backend": choice.backend.name,
        "page_size": args.page_size,
        "token_bytes": DENSE_ROW_BYTES,
        "pages": pages,
        **dense,
    }
    _print_table(result)
    return result


def _time_formats(
    backend: AttentionBackend, context: int, args: argparse.Namespace, refused: dict[str, str]
) -> Iterator[tuple[str, AppendTiming]]:
    """Each format that the backend can hold; why not, of the others, goes into ``refused``."""
    for name in args.formats:
        try:
            timing = time_pages(backend, name, context=context, tokens=args.tokens, page_size=args.page_size)
        except ValueError as refusal:
            refused[name] = str(refusal)
        else:
            yield name, timing


def _check_memory(positions: int) -> None:
    """InvalidConfig unless the dense arrays of the longest context fit, old and new at once."""
    needed, available = dense_bytes(positions), available_memory()
    if needed > available:
        raise InvalidConfig(
            f"concatenating {positions} positions takes {format_size(needed)}, {format_size(available)} are "
            "free; give a smaller --contexts"
        )


def _row(timing: AppendTiming) -> dict[str, float]:
    return {
        "us_per_token": timing.seconds * 1e6,
        "worst_us": timing.worst * 1e6,
        "bytes_per_token": timing.num_bytes,
    }


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, by_context in result["pages"].items():
        yield f"pages {name}", by_context
    yield "concatenation", result["concatenate"]
    yield "mlx-lm KVCache", result["mlx_lm"]


def _print_table(result: dict[str, Any]) -> None:
    print(
        "one layer's K and V of one token (8 KV heads, head_dim 128), after so many others;\n"
        "beside bf16 pages, concatenation and mlx-lm's cache are bf16 too"
    )
    print("stored in        context  us/token  worst us  bytes/token")
    for name, by_context in _rows(result):
        for context, row in by_context.items():
            print(
                f"{name:15} {context:>8} {row['us_per_token']:9.1f} {row['worst_us']:9.1f} "
                f"{row['bytes_per_token']:12,.0f}"
            )
