"""``octavo cache``: inspect and control the prefix cache of a running server."""

from __future__ import annotations

import argparse
import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ..arguments.options import add_json_argument, print_json
from ..arguments.security import add_connection_arguments, credentials_of
from ..arguments.usage import from_zero, token_ids

if TYPE_CHECKING:
    from octavo.v1.cache_pb2 import GetStatsResponse

    from ..client.client import Client

Result = Mapping[str, Any]
Action = Callable[["Client", argparse.Namespace], Awaitable[Result]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (text, fill, action) in _ACTIONS.items():
        described = f"{text[0].upper()}{text[1:]}."
        actions.add_parser(
            name, help=text, description=described, fill=functools.partial(_fill, fill=fill, action=action)
        )


def _fill(
    parser: argparse.ArgumentParser, *, fill: Callable[[argparse.ArgumentParser], object], action: Action
) -> None:
    fill(parser)
    parser.add_argument("--connect", metavar="HOST:PORT", required=True, help="gRPC address of the server")
    add_connection_arguments(parser)
    add_json_argument(parser)
    parser.set_defaults(run_action=action)


def run(args: argparse.Namespace) -> int:
    result = asyncio.run(_run(args))
    if args.json:
        print_json(result)
    return 0


async def _run(args: argparse.Namespace) -> Result:
    from ..client.client import Client

    async with Client(args.connect, credentials_of(args)) as client:
        result: Result = await args.run_action(client, args)
        return result


def _as_json(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None:
            found[field.name] = [_as_json(item) for item in value] if field.is_repeated else _as_json(value)
        elif field.enum_type is not None:
            found[field.name] = _reason(value)
        else:
            found[field.name] = value
    return found


def _reason(number: int) -> str:
    from octavo.proto import cache_pb2

    return cache_pb2.MissReason.Name(number).removeprefix("MISS_REASON_").lower()


async def _stats(client: Client, args: argparse.Namespace) -> Result:
    stats = await client.cache.stats(args.prefixes)
    print("\n".join(_stats_lines(stats)))
    return _as_json(stats)


def _residual_lines(stats: GetStatsResponse) -> list[str]:
    residual = stats.residual_pages
    if not stats.HasField("residual_pages"):
        return []
    return [
        f"residual pages: {residual.held} in use, {residual.idle_cached} cached, {residual.idle_empty} empty"
    ]


def _stats_lines(stats: GetStatsResponse) -> list[str]:
    pages, queried = stats.pages, max(stats.query_tokens, 1)
    state = "" if stats.enabled else " (off: prompts are not looked up)"
    lines = [
        f"pages of {stats.page_size} tokens: {pages.held} in use, {pages.idle_cached} cached, "
        f"{pages.idle_empty} empty; {stats.evicted_pages} evicted so far (policy {stats.policy}){state}",
        *_residual_lines(stats),
        f"prompt tokens: {stats.query_tokens} looked up, {stats.hit_tokens} found "
        f"({stats.hit_tokens / queried:.1%})",
    ]
    lines += [f"  not found, {_reason(miss.reason)}: {miss.tokens}" for miss in stats.misses]
    lines.append(f"pinned pages: {stats.pinned_pages} of at most {stats.max_pinned_pages}")
    lines += [f"  {pin.name}: {pin.num_tokens} tokens" for pin in stats.pins]
    if stats.prefixes:
        lines.append("prefixes that saved most (tokens saved, hits, length):")
    lines += [
        f"  {each.tokens_saved} saved, {each.num_hits} hits, {each.end} tokens {each.text[:60]!r}"
        for each in stats.prefixes
    ]
    return lines


async def _explain(client: Client, args: argparse.Namespace) -> Result:
    found = await client.cache.explain(args.request_id)
    print(found.text)
    return _as_json(found)


async def _save(client: Client, args: argparse.Namespace) -> Result:
    saved = await client.cache.save(args.path)
    gone = saved.num_missing_pages
    print(
        f"saved {saved.num_pages} pages ({saved.num_tokens} tokens, {saved.num_bytes} bytes)"
        + (f"; {gone} more were evicted during the save" if gone else "")
    )
    return _as_json(saved)


async def _load(client: Client, args: argparse.Namespace) -> Result:
    loaded = await client.cache.load(args.path)
    text = f"loaded {loaded.num_pages} pages ({loaded.num_tokens} tokens)"
    print(
        f"{text}; {loaded.num_known_pages} were cached already, {loaded.num_skipped_pages} did not fit"
        + (f"; converted: {loaded.converted}" if loaded.converted else "")
    )
    return _as_json(loaded)


async def _flush(client: Client, _args: argparse.Namespace) -> Result:
    num_pages = await client.cache.flush()
    print(f"discarded {num_pages} cached pages")
    return {"num_pages": num_pages}


async def _pin(client: Client, args: argparse.Namespace) -> Result:
    from ..client.cache_client import prefix_of

    what = prefix_of(
        text=args.text, token_ids=args.prompt_ids, request_id=args.request_id, cache_salt=args.cache_salt
    )
    pinned = await client.cache.pin(args.name, what)
    print(f"{args.name}: {pinned.num_tokens} of {pinned.prefix_tokens} tokens are pinned")
    return _as_json(pinned)


async def _unpin(client: Client, args: argparse.Namespace) -> Result:
    reply = await client.cache.unpin(args.name)
    print(f"{args.name} was unpinned; {reply.pinned_pages} pages of other pins remain")
    return _as_json(reply)


async def _watch(client: Client, args: argparse.Namespace) -> Result:
    num_events = number = 0
    async with aclosing(client.cache.watch(args.start)) as responses:
        async for response in responses:
            number = response.number
            kind = response.WhichOneof("event")
            if kind is None:
                if response.log_id:
                    print(f"watching log {response.log_id} after event {number}", flush=True)
                continue
            num_pages = len(getattr(response, kind).digests) if kind != "cleared" else 0
            print(f"{number} {kind}" + (f" {num_pages} pages" if num_pages else ""), flush=True)
            num_events += 1
            if num_events == args.events:
                break
    return {"num_events": num_events, "number": number}


def _stats_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefixes", type=from_zero, metavar="N", help="maximum number of prefixes to list (default: 10)"
    )


def _argument(name: str, metavar: str, text: str) -> Callable[[argparse.ArgumentParser], object]:
    return lambda parser: parser.add_argument(name, metavar=metavar, help=text)


_PATH = _argument("path", "DIR", "folder on the server, relative to its --save-dir")
_NAME = _argument("name", "NAME", "name of the pin")


def _pin_arguments(parser: argparse.ArgumentParser) -> None:
    _NAME(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", metavar="T", help="text of the prefix to pin")
    what.add_argument("--prompt-ids", type=token_ids, metavar="1,2,3",
        help="token ids of the prefix to pin")  # fmt: skip
    what.add_argument(
        "--request-id", metavar="ID", help="id of a recent request; its prompt and output are pinned"
    )
    parser.add_argument(
        "--cache-salt", default="", metavar="S", help="cache salt of the requests that may reuse the prefix"
    )


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    add = functools.partial(parser.add_argument, type=from_zero, metavar="N")
    add("--start", help="number of the first event to print (default: the next event)")
    add("--events", default=0, help="number of events after which to stop; 0 never stops")


_ACTIONS: Mapping[str, tuple[str, Callable[[argparse.ArgumentParser], object], Action]] = {
    "stats": ("print occupancy, hit ratios and the prefixes that save most tokens", _stats_arguments, _stats),
    "explain": (
        "print how many prompt tokens of a request were cached, and why the others were not",
        _argument("request_id", "ID", "id of a recent request"),
        _explain,
    ),
    "save": ("write all cached pages to a folder on the server", _PATH, _save),
    "load": ("load pages that `save` has written", _PATH, _load),
    "flush": ("discard cached pages that no request uses", lambda _: None, _flush),
    "pin": ("protect a cached prefix from eviction", _pin_arguments, _pin),
    "unpin": ("end the protection of a pinned prefix", _NAME, _unpin),
    "watch": ("print events of cached pages as they occur", _watch_arguments, _watch),
}
