from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st

from octavo.block_manager import FullAttention, KVGroupSpec, RecurrentState, ResidualWindow, SlidingWindow
from octavo.block_manager.spec import pages_touched


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: tuple[int, ...]
    salt: bytes = b""
    name: str = ""


@dataclass(frozen=True)
class Event:
    """An event at one step for one sample.

    abort:           before the step is planned
    abort_in_flight: after the step is built, before its results
    fail:            the engine reports a failed sample
    rollback:        the sample loses ``amount`` written positions."""

    kind: str
    step: int
    request: int
    sample: int
    amount: int = 1


@dataclass(frozen=True)
class Workload:
    page_size: int
    groups: tuple[KVGroupSpec, ...]
    max_running: int
    max_step_tokens: int
    arrivals_per_step: int
    requests: tuple[Request, ...]
    events: tuple[Event, ...] = ()
    prefix_cache: bool = True
    states: RecurrentState | None = None
    drafts: int = 0


EVENTS = ("abort", "abort_in_flight", "fail", "rollback")

states = st.none() | st.builds(
    RecurrentState, num_slots=st.integers(1, 6), slot_bytes=st.just(1), every_page=st.booleans()
)

# Two token IDs, so that prompts often share a prefix.
prompts = st.lists(st.integers(1, 2), min_size=1, max_size=20).map(tuple)
requests = st.builds(
    Request,
    prompt=prompts,
    max_tokens=st.lists(st.integers(1, 8), min_size=1, max_size=4).map(tuple),
    salt=st.sampled_from([b"", b"", b"other tenant"]),
)
events = st.builds(
    Event,
    kind=st.sampled_from(EVENTS),
    step=st.integers(1, 16),
    request=st.integers(0, 6),
    sample=st.integers(0, 3),
    amount=st.integers(1, 9),
)


@st.composite
def page_groups(
    draw: st.DrawFn, need: int, page_size: int, max_chunk: int, spare: int = 12
) -> tuple[KVGroupSpec, ...]:
    """One group, or several with different windows, each with at least the pages of one sequence."""
    windows: tuple[int | None, ...] = draw(
        st.sampled_from([(None,), (None,), (None, 5), (3,), (None, 9, 2), (6, 1)])
    )
    groups: list[KVGroupSpec] = []
    for window in windows:
        keep = draw(st.sampled_from([0, 0, 1, 5])) if window is not None else 0
        most = need
        if window is not None:
            most = min(need, -(-keep // page_size) + pages_touched(window - 1 + max_chunk, page_size))
        num_pages = most + draw(st.integers(0, spare))
        if window is None:
            groups.append(FullAttention(num_pages=num_pages))
        else:
            groups.append(SlidingWindow(num_pages=num_pages, window=window, keep=keep))
    if draw(st.booleans()):
        groups += [
            draw(residual_windows(index, group, need, page_size, max_chunk))
            for index, group in enumerate(groups)
        ]
    return tuple(groups)


@st.composite
def residual_windows(
    draw: st.DrawFn, index: int, of: KVGroupSpec, need: int, page_size: int, max_chunk: int
) -> KVGroupSpec:
    """The residual window of a group, with hardly more pages than one sequence needs."""
    window = min(draw(st.sampled_from([1, 1, 1, 2, page_size + 1])), of.window or need * page_size)
    keep = draw(st.sampled_from([0, 1, 5])) if of.window is None else of.keep
    after = draw(st.sampled_from([0, 0, 4, 7, 11]))
    seen = max(window, min(after, of.window or after))
    most = min(need, -(-keep // page_size) + pages_touched(seen - 1 + max_chunk, page_size))
    return ResidualWindow(
        num_pages=most + draw(st.integers(0, 2)),
        window=window,
        keep=keep,
        residual_of=index,
        outer_window=of.window,
        quantize_after=after,
    )


@st.composite
def workloads(draw: st.DrawFn, kinds: tuple[str, ...] = EVENTS) -> Workload:
    """Requests that each fit the pool alone, with little space beyond, and random events."""
    page_size = draw(st.sampled_from([1, 2, 4, 8]))
    wanted = draw(st.lists(requests, min_size=1, max_size=7))
    need = max(-(-(len(r.prompt) + max(r.max_tokens)) // page_size) for r in wanted)
    max_running = draw(st.integers(1, 6))
    max_step_tokens = draw(st.integers(max_running, 24))
    happening = draw(st.lists(events.filter(lambda event: event.kind in kinds), max_size=5)) if kinds else []
    return Workload(
        page_size=page_size,
        groups=draw(page_groups(need, page_size, max_step_tokens)),
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        arrivals_per_step=draw(st.integers(1, 4)),
        requests=tuple(wanted),
        events=tuple(happening),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
        states=draw(states),
        drafts=draw(st.sampled_from([0, 0, 1, 3, 9])),
    )
