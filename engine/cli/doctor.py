"""``octavo doctor``: show and test the kernels of this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any, get_args

import octavo

from ..api.config import Backend, EngineConfig, Weights
from ..api.errors import InvalidConfig
from ..arguments.options import add_json_argument, print_json
from ..arguments.usage import whole_number
from ..memory.budget import format_size
from .model_report import examine_model, model_lines

PACKAGES = ("mlx", "mlx-lm", "numpy", "tokenizers", "safetensors", "grpcio", "protobuf", "prometheus-client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", choices=get_args(Backend), default="auto", help="backend to describe and test"
    )
    parser.add_argument(
        "--threads", type=whole_number, metavar="N", help="number of CPU threads for the kernels"
    )
    add = parser.add_argument
    add("--model", metavar="PATH|HUB_ID|demo|demo-hybrid", help="model to load, to print also which of its "
        "parts run on native kernels")  # fmt: skip
    add("--weights", choices=get_args(Weights), help="number format to which the model's weights are "
        "quantized while loading")  # fmt: skip
    add("--exact", action="store_const", const=True, help="refuse kernels and formats with less "
        "precision than the number format of the checkpoint")  # fmt: skip
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    config = _model_config(args)
    if config is not None:
        _prepare_device(config)
    report = examine(args.backend, args.threads, exact=args.exact is True)
    print(f"octavo {octavo.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    print(f"backend {report['backend']}: {report['reason']}")
    promised = "yes" if report["batch_invariant"] else "no"
    print(f"batch invariant: {promised} ({report['batch_invariant_reason']})")
    arithmetic = ", no 8-bit arithmetic" if report["exact"] else ""
    print(f"instruction set {report['isa']}, {report['threads']} threads{arithmetic}")
    for line in _metal_lines(report["metal_settings"]):
        print(line)
    for test in report["self_test"]:
        print(f"  {'ok  ' if test['ok'] else 'FAIL'} {test['name']} ({_error_text(test['max_error'])})")
    failed = sum(not test["ok"] for test in report["self_test"])
    total = len(report["self_test"])
    print(f"self-test: {total - failed} of {total} passed" if failed else f"self-test: all {total} passed")
    if config is not None:
        report["model"] = examine_model(config)
        if report["batch_invariant"] and (kept := report["model"]["kept"]):
            report["batch_invariant"] = False
            report["batch_invariant_reason"] = f"{len(kept)} of the model's layers are computed by MLX"
            print(f"batch invariant with this model: no ({report['batch_invariant_reason']})")
        for line in model_lines(report["model"]):
            print(line)
    if args.json:
        print_json(report)
    return 1 if failed else 0


def _model_config(args: argparse.Namespace) -> EngineConfig | None:
    given = {name: v for name in ("weights", "exact") if (v := getattr(args, name)) is not None}
    if args.model is None:
        if "weights" in given:
            raise InvalidConfig("--weights must come with a model, got none; add --model")
        return None
    from ..memory.model_files import resolve_model

    resolve_model(args.model)
    return EngineConfig(model=args.model, backend=args.backend, threads=args.threads, **given)


def _prepare_device(config: EngineConfig) -> None:
    from ..executor.load.metal_settings import prepare_device
    from ..memory.budget import weights_bytes
    from ..memory.model_files import read_config, resolve_model

    path = resolve_model(config.model, config.revision)
    prepare_device(config, read_config(path), weights_bytes(path))


def _metal_lines(settings: dict[str, Any] | None) -> list[str]:
    if settings is None:
        return []
    buffers = ", ".join(
        f"{name}={settings[name] or 'set when a model is loaded, by the size of the page pool'}"
        for name in ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")
    )
    return [
        f"Metal memory: {format_size(settings['wired_limit'])} wired, a cache of at least "
        f"{format_size(settings['cache_limit_at_least'])} for freed buffers",
        f"Metal command buffers: {buffers}",
    ]


def examine(backend_name: str, threads: int | None, *, exact: bool = False) -> dict[str, Any]:
    from octavo.kernels.backends import choose_backend, native_instructions
    from octavo.kernels.verify.selftest import run_selftest

    from ..executor.load.metal_settings import describe_settings

    try:
        choice = choose_backend(backend_name, threads, exact=exact)
    except ValueError as error:
        raise InvalidConfig(str(error)) from error
    isa, num_threads = native_instructions()
    invariant, why = batch_invariance(choice.backend.name)
    results = run_selftest(choice.backend)
    return {
        "backend": choice.backend.name,
        "reason": choice.reason,
        "isa": {"cpu": isa, "metal": "Metal, compiled by MLX"}.get(
            choice.backend.name, "none (MLX operations)"
        ),
        "metal_settings": describe_settings(),
        "threads": num_threads if choice.backend.has_model_ops else 1,
        "exact": exact,
        "batch_invariant": invariant,
        "batch_invariant_reason": why,
        "versions": {"octavo": octavo.__version__, "python": platform.python_version()} | _versions(),
        "self_test": [
            # JSON has no infinity
            {"name": r.name, "max_error": r.max_error if r.max_error < float("inf") else None, "ok": r.ok}
            for r in results
        ],
        "ok": all(result.ok for result in results),
    }


def batch_invariance(backend: str) -> tuple[bool, str]:
    """Return whether results are bit-identical in any batch, and the reason."""
    reasons = {
        "cpu": "native kernels add in a fixed order; check with `octavo bench invariance`",
        "metal": "never measured on Apple hardware, and MLX chooses kernels by the number of rows",
    }
    return backend == "cpu", reasons.get(backend, "MLX chooses its kernels by the number of rows")


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _error_text(error: float | None) -> str:
    return "no finite result" if error is None else f"largest error {error:.2g}"
