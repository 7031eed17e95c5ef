"""``octavo generate``: complete one prompt, locally or on a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from ..api.errors import InvalidConfig, InvalidRequest, RequestFailed
from ..api.outputs import Delta
from ..api.prompt import Prompt
from ..api.sampling_params import SamplingParams
from ..api.structured_output import StructuredOutput
from ..arguments.options import (
    add_engine_arguments,
    add_json_argument,
    add_log_level_argument,
    add_sampling_arguments,
    engine_config,
    engine_flags,
    given_settings,
    print_json,
    sampling_arguments,
    set_up_logging,
)
from ..arguments.security import add_connection_arguments, credentials_of
from ..arguments.usage import token_ids
from ..client.credentials import ClientCredentials
from .answer import Answer, Drafts

MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT|-", help="text to continue; - reads it from stdin")
    add("--prompt-ids", type=token_ids, metavar="1,2,3", help="token ids to continue, instead of text")
    add("--connect", metavar="HOST:PORT", help="gRPC address of a server to use, instead of loading a model")
    add_connection_arguments(parser)
    add("--adapter", metavar="NAME", help="name of the LoRA adapter to use, from --lora-modules or on the "
        "server")  # fmt: skip
    add("--image", type=Path, action="append", metavar="FILE", help="image file to put before the prompt; "
        "needs a model with --vision; repeatable; implies --chat")  # fmt: skip
    add("--chat", action="store_true", help="apply the chat template to the prompt, as a user's message")
    add("--system", metavar="S", help="system message; implies --chat")
    add_sampling_arguments(parser, max_tokens=MAX_TOKENS)
    add_structured_arguments(parser)
    add_json_argument(parser)
    add_log_level_argument(parser, "warning")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    set_up_logging(args)
    prompt, params = prompt_of(args), params_of(args)
    if args.connect is not None and (settings := given_settings(args)):
        option = engine_flags(settings)[0]
        raise InvalidConfig(
            f"{option} must be given to the server (`octavo serve {option} ...`), or drop --connect"
        )
    credentials = credentials_of(args)
    answer = asyncio.run(_generate(args, prompt, params, credentials))
    answer.print_rest()
    print(answer.summary(), file=sys.stderr)
    if args.json:
        print_json(answer.as_json())
    failed = next((sample.error for sample in answer.samples if sample.error is not None), None)
    if failed is not None:
        raise RequestFailed(failed)
    return 0


def prompt_of(args: argparse.Namespace) -> Prompt:
    """Return the prompt of the options. Raises InvalidRequest if the options conflict."""
    images = [{"type": "image", "image": file} for file in args.image or ()]
    chat = args.chat or args.system is not None or images
    if args.prompt_ids is not None:
        if args.prompt is not None:
            raise InvalidRequest("PROMPT and --prompt-ids exclude each other; give one of them")
        if chat:
            raise InvalidRequest(
                "--chat, --system and --image need text, but --prompt-ids gives token ids; use PROMPT"
            )
        return list(args.prompt_ids)
    if args.prompt is None:
        raise InvalidRequest("a prompt must be given; give PROMPT, - to read stdin, or --prompt-ids")
    text = _read_stdin() if args.prompt == "-" else args.prompt
    if not chat:
        return str(text)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    content = [*images, {"type": "text", "text": str(text)}] if images else text
    return [*system, {"role": "user", "content": content}]


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"standard input must be {error.encoding} text: {error.reason}; convert it"
        ) from error


def params_of(args: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters. Raises InvalidRequest for a value out of range."""
    given = {"max_tokens": MAX_TOKENS} | sampling_arguments(args)
    return SamplingParams(**given, structured=structured_of(args))


async def _generate(
    args: argparse.Namespace, prompt: Prompt, params: SamplingParams, credentials: ClientCredentials
) -> Answer:
    if args.connect is not None:
        from ..api.address import parse_address
        from ..client.client import Client

        async with Client(str(parse_address(args.connect)), credentials) as client:
            return await _collect(client.generate(prompt, params, adapter=args.adapter), Answer(params.n))
    from ..frontend.async_engine import AsyncEngine

    config = engine_config(args)
    drafts = None if config.speculate == "off" else Drafts()
    engine = AsyncEngine(config, observer=drafts)
    await engine.start()
    try:
        deltas = engine.generate(prompt, params, adapter=args.adapter)
        return await _collect(deltas, Answer(params.n, drafts))
    finally:
        await engine.stop()


async def _collect(deltas: AsyncGenerator[Delta, None], answer: Answer) -> Answer:
    async with aclosing(deltas):
        async for delta in deltas:
            answer.add(delta)
    return answer


def add_structured_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output", "structured output (at most one of these)")
    add = group.add_argument
    add("--json-schema", type=Path, metavar="FILE", help="JSON schema that the output must validate against")
    add("--json-object", action="store_true", help="make the output a JSON object")
    add("--regex", metavar="R", help="regular expression that the whole output must match")
    add("--grammar", type=Path, metavar="FILE", help="grammar of the output, in EBNF (GBNF) or Lark notation")
    add("--choice", action="append", default=[], metavar="S",
        help="text that the output may be; repeat the option for each allowed text")  # fmt: skip


def structured_of(args: argparse.Namespace) -> StructuredOutput | None:
    """Return the output constraint. Raises InvalidRequest for conflicting options or an unreadable file."""
    if not (args.json_schema or args.json_object or args.regex is not None or args.grammar or args.choice):
        return None
    return StructuredOutput(
        json_schema=_read("--json-schema", args.json_schema),
        json_object=args.json_object,
        regex=args.regex,
        grammar=_read("--grammar", args.grammar),
        choice=tuple(args.choice),
    )


def _read(flag: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{flag}: cannot read {path} ({error}); give a text file") from error
