"""``octavo doctor``: what this machine runs on, and whether its kernels are right."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any, get_args

import octavo
from octavo.engine.cli.options import add_json_argument, print_json
from octavo.engine.config import Backend
from octavo.engine.errors import InvalidConfig

PACKAGES = ("mlx", "mlx-lm", "numpy", "tokenizers", "safetensors", "grpcio", "protobuf", "prometheus-client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=get_args(Backend), default="auto", help="which one to examine")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of the kernels")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    report = examine(args.backend, args.threads)
    print(f"octavo {octavo.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    print(f"backend {report['backend']}: {report['reason']}")
    print(f"instruction set {report['isa']}, {report['threads']} threads")
    for test in report["self_test"]:
        print(f"  {'ok  ' if test['ok'] else 'FAIL'} {test['name']} ({_error_text(test['max_error'])})")
    failed = sum(not test["ok"] for test in report["self_test"])
    total = len(report["self_test"])
    print(f"self-test: {total - failed} of {total} passed" if failed else f"self-test: all {total} passed")
    if args.json:
        print_json(report)
    return 1 if failed else 0


def examine(backend_name: str, threads: int | None) -> dict[str, Any]:
    """Backend, instruction set, threads, versions and self-test, as ``--json`` prints them."""
    from octavo.kernels.backends import choose_backend
    from octavo.kernels.selftest import run_selftest

    try:
        choice = choose_backend(backend_name, threads)
    except ValueError as error:
        raise InvalidConfig(str(error)) from error
    isa, num_threads = _native()
    results = run_selftest(choice.backend)
    return {
        "backend": choice.backend.name,
        "reason": choice.reason,
        "isa": {"cpu": isa, "metal": "Metal, compiled by MLX"}.get(
            choice.backend.name, "none (plain MLX operations)"
        ),
        "threads": num_threads if choice.backend.name == "cpu" else 1,
        "versions": {"octavo": octavo.__version__, "python": platform.python_version()} | _versions(),
        "self_test": [
            # JSON has no infinity: a check without a number to show says null
            {"name": r.name, "max_error": r.max_error if r.max_error < float("inf") else None, "ok": r.ok}
            for r in results
        ],
        "ok": all(result.ok for result in results),
    }


def _native() -> tuple[str, int]:
    """Instruction set and threads of the native extension, if there is one."""
    try:
        from octavo.kernels import _ext
    except ImportError:
        return "none", 1
    return _ext.isa(), _ext.threads()


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
