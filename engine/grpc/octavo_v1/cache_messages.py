from __future__ import annotations

from collections.abc import Mapping

from octavo.block_manager import Miss, PageEvent
from octavo.proto import cache_pb2 as pb
from octavo.proto import generation_pb2

from ...api.errors import InvalidRequest
from ...api.prompt import Prompt
from ...api.stats import Gauges
from ...inspection.lookup_history import LookupRecord
from ...inspection.prefix_cache_inspector import CacheTotals
from ...inspection.reused_prefixes import ReusedPrefix
from ..packed_ids import ids_of
from .messages import chat_prompt, pages_message

MAX_NAME = 256
MAX_PREFIXES = 1000
DEFAULT_PREFIXES = 10
OFF = "the prefix cache is off: the server was started with --no-prefix-cache"


def num_prefixes(request: pb.GetStatsRequest) -> int:
    asked = request.num_prefixes if request.HasField("num_prefixes") else DEFAULT_PREFIXES
    if not 0 <= asked <= MAX_PREFIXES:
        raise InvalidRequest(f"num_prefixes must be between 0 and {MAX_PREFIXES}, got {asked}")
    return asked


def prompt_of(prefix: pb.Prefix) -> Prompt:
    """Return the prompt of a prefix message. Raises InvalidRequest."""
    match prefix.WhichOneof("prefix"):
        case "text":
            return prefix.text
        case "token_ids":
            return ids_of(prefix.token_ids, prefix.token_ids.ids)
        case "chat":
            return chat_prompt(prefix.chat)
    raise InvalidRequest("the prefix is empty; set one of text, token_ids, chat and request_id")


def pin_name(name: str) -> str:
    if not 0 < len(name) <= MAX_NAME:
        raise InvalidRequest(f"a pin's name must have 1 to {MAX_NAME} characters, got {len(name)}")
    return name


def _reason(miss: str) -> str:
    return f"MISS_REASON_{miss.upper()}"


def misses_message(misses: Mapping[str, int], *, hide_salts: bool) -> list[pb.MissTokens]:
    shown = dict(misses)
    if hide_salts and (hidden := shown.pop("other_salt", 0)):
        shown["new"] = shown.get("new", 0) + hidden
    return [pb.MissTokens(reason=_reason(reason), tokens=tokens) for reason, tokens in shown.items()]


def stats_message(
    totals: CacheTotals, gauges: Gauges, pins: Mapping[str, int], *, hide_salts: bool
) -> pb.GetStatsResponse:
    residual = gauges.residual
    return pb.GetStatsResponse(
        pages=pages_message(gauges),
        residual_pages=None if residual is None else generation_pb2.PageCounts(**residual._asdict()),
        page_size=totals.page_size,
        policy=totals.policy,
        enabled=totals.enabled,
        query_tokens=totals.query_tokens,
        hit_tokens=totals.hit_tokens,
        misses=misses_message(totals.miss_tokens, hide_salts=hide_salts),
        evicted_pages=totals.evicted_pages,
        pinned_pages=totals.pinned_pages,
        max_pinned_pages=totals.max_pinned_pages,
        pins=[pb.PinStats(name=name, num_tokens=kept) for name, kept in sorted(pins.items())],
    )


def prefix_message(prefix: ReusedPrefix, text: str) -> pb.PrefixStats:
    return pb.PrefixStats(
        end=prefix.num_tokens,
        num_hits=prefix.num_hits,
        tokens_saved=prefix.tokens_saved,
        text=text,
    )


def explain_message(
    found: LookupRecord, request_id: str, *, page_size: int, enabled: bool, salt_prefix: bytes
) -> pb.ExplainResponse:
    """Explain why a prefix lookup missed. Data of other tenants are hidden."""
    miss = found.miss
    own_salt = any(salt.startswith(salt_prefix) for salt in miss.other_salts)
    hide = miss.reason == "other_salt" and not own_salt
    reason = "new" if hide else miss.reason
    before = None if miss.evicted_at is None else max(found.at - miss.evicted_at, 0.0)
    position = miss.page * page_size
    return pb.ExplainResponse(
        request_id=request_id,
        prompt_tokens=found.num_tokens,
        cached_tokens=found.num_hit,
        miss_position=position,
        reason=_reason(reason),
        evicted_seconds_before=before,
        misses=misses_message(found.misses, hide_salts=hide),
        text=f"{found.num_hit} of {found.num_tokens} prompt tokens were cached; "
        + (_sentence(reason, miss, before, page_size) if enabled else OFF),
    )


def _sentence(reason: str, miss: Miss, before: float | None, page_size: int) -> str:
    position = miss.page * page_size
    page = f"the page at position {position}"
    match reason:
        case "no_state":
            there = miss.num_pages * page_size
            nearest = f"the state before is at {position}" if position else "no earlier state is cached"
            return f"pages reach to position {there}, but no recurrent state is cached there; {nearest}"
        case "evicted":
            return f"{page} was evicted {before or 0.0:.1f} s before this request, when the pool needed pages"
        case "other_salt":
            return f"{page} was cached only under another salt, and pages are not shared between salts"
        case "last_token":
            return f"{page} has the prompt's last token, which is always computed"
        case "partial_page":
            return f"the tokens from position {position} on do not fill a page of {page_size} tokens"
        case "disabled":
            return "the request needs results for the whole prompt (prompt_logprobs), so it is computed anew"
        case "other_format":
            return f"{page} is on disk, but in another page format or of another model"
    return f"{page} was never cached, or so long ago that no record of it remains"


def watch_message(event: PageEvent, salt_prefix: bytes) -> pb.WatchResponse:
    """Convert a page event to a message. Events of other tenants contain no details."""
    response = pb.WatchResponse(number=event.number)
    digests = event.digests_of(salt_prefix)
    match event.kind:
        case "stored" if digests:
            response.stored.digests.extend(digests)
            response.stored.parent = event.parent or b""
        case "removed" if digests:
            response.removed.digests.extend(digests)
        case "cleared":
            response.cleared.SetInParent()
    return response
