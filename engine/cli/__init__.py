"""The ``octavo`` command. Exit codes: 0 success, 2 wrong usage or input, 1 failure.

Only the module of the requested command is imported, so ``octavo --help`` is fast.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import functools
import importlib
import importlib.util
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence

import octavo

from ..api.errors import InvalidConfig, InvalidRequest, OctavoError
from ..arguments.sources import option_names, warn_of_unknown
from ..arguments.usage import Parser, say_error

COMMANDS = {
    "serve": "serve a model over gRPC and HTTP until SIGTERM or SIGINT",
    "generate": "continue one prompt, in this process or on a server",
    "bench": "measure the engine, the server, the kernels or the scheduler",
    "replay": "simulate the prefix cache on recorded traffic and print its hit ratio",
    "cache": "inspect and control the prefix cache of a server",
    "plan": "print how many pages and sequences fit into a memory budget",
    "models": "list how each architecture of the installed mlx-lm is served, tried with tiny random models",
    "doctor": "print which kernels this machine and a model use, and test them",
}


LAB = ("bench", "replay", "models")  # commands of the package octavo-lab


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _accept_any_encoding()
    if arguments[:1] == ["serve"] and threading.current_thread() is threading.main_thread():
        # As the first process of a container, the command would ignore SIGTERM without a handler.
        signal.signal(signal.SIGTERM, _leave_at_once)
    # The container image starts this process with SIGTERM blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    try:
        args = _parser().parse_args(arguments)
        if args.command != "serve":
            warn_of_unknown(lambda: option_names(command_parser(["serve"])), os.environ)
    except SystemExit as leave:  # raised by argparse for --help, --version and usage errors
        return leave.code if isinstance(leave.code, int) else 2
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except (InvalidConfig, InvalidRequest) as error:
        say_error(args.command, error)
        return 2
    except OctavoError as error:
        say_error(args.command, error)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say_error(args.command, f"cannot write {error.filename or 'the output'}: {error.strerror}; make room")
        return 1
    return code


def _accept_any_encoding() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and codecs.lookup(sys.stdin.encoding).name == "ascii":
        sys.stdin.reconfigure(encoding="utf-8")


def _leave_at_once(*_: object) -> None:
    raise SystemExit(0)


def command_parser(command: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a command such as ``("bench", "engine")``, for documentation."""
    return functools.reduce(Parser.command, command, _parser())


def _parser() -> Parser:
    parser = Parser(prog="octavo", description="A paged-attention LLM serving engine on MLX.")
    parser.add_argument("--version", action="version", version=f"octavo {octavo.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        description = f"{text[0].upper()}{text[1:]}."
        commands.add_parser(name, help=text, description=description, fill=functools.partial(_fill, name))
    return parser


def _fill(name: str, parser: argparse.ArgumentParser) -> None:
    home = "octavo.engine.cli"
    if name in LAB:
        if importlib.util.find_spec("octavo_lab") is None:
            parser.error(f"`octavo {name}` is part of octavo-lab, which is not installed; pip install ./lab")
        home = "octavo_lab.commands"
    command = importlib.import_module(f"{home}.{name}")
    command.add_arguments(parser)
    parser.set_defaults(run=command.run)
