"""``octavo replay``: prefix-cache hits in recorded traffic, without a model."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.size import parse_size
from octavo.engine.arguments.options import add_json_argument, print_json
from octavo.engine.arguments.usage import checked, positive, seconds, whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    import octavo_lab.policies  # noqa: F401 (registers policies)
    from octavo.block_manager.policies import DEFAULT_POLICY, POLICIES

    from ..cache_sim.run import TOKEN_MS
    from ..cache_sim.workloads import SEED

    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE.jsonl", help="trace file with a JSON object per line and request: "
        "timestamp (ms), input_length, output_length, hash_ids (one per page)")  # fmt: skip
    add("--page-size", type=positive, default=512, metavar="N",
        help="number of tokens per page; the trace has one hash id per page")  # fmt: skip
    add("--num-pages", type=_pages, default="inf", metavar="N|inf", help="size of the page pool in pages")
    add("--policy", choices=POLICIES, default=DEFAULT_POLICY, help="eviction order of idle pages")
    add("--salt-field", metavar="F", help="field of the trace to use as cache salt; requests share pages "
        "only if their salts are equal")  # fmt: skip
    add("--timed", action="store_true", help="hold the pages of a request while it runs; without this option "
        "a request takes no time")  # fmt: skip
    add("--token-ms", type=seconds, default=TOKEN_MS, metavar="MS",
        help="duration of a generated token in milliseconds, for --timed")  # fmt: skip
    add("--optimum", action="store_true", help="also print the hit ratio of a policy that knows the future")
    add("--compare", action="store_true", help="print a table of all policies and several pool sizes, for "
        "the trace and for synthetic traffic")  # fmt: skip
    add("--state-bytes", type=checked(parse_size), metavar="SIZE", help="size of a sequence's recurrent "
        "state, to print hit ratios by the share of memory for snapshots (needs --page-bytes)")  # fmt: skip
    add("--state-share", type=_shares, default=None, metavar="F,F",
        help="shares of memory for snapshots, for --state-bytes (default: 0.01 to 0.75)")  # fmt: skip
    add("--page-bytes", type=checked(parse_size), metavar="SIZE", help="size of a page, for --state-bytes")
    add("--seed", type=whole_number, default=SEED, metavar="N",
        help="seed of the synthetic traffic, for --compare")  # fmt: skip
    add("--plot", type=Path, metavar="F.png",
        help="image file for a plot of hit ratio against pool size, for every policy and the optimum; with "
        "--state-bytes for every snapshot policy (needs matplotlib)")  # fmt: skip
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    from ..cache_sim.compare import compare, plot, render
    from ..cache_sim.optimum import optimal_hits
    from ..cache_sim.run import replay
    from ..cache_sim.states import SHARES, SIZES, compare_states, plot_states, render_states
    from ..cache_sim.trace import read_trace
    from ..cache_sim.workloads import WORKLOADS
    from ..plots.figure import require_matplotlib

    require_matplotlib(args.plot)
    if args.state_bytes is None and args.state_share is not None:
        raise InvalidRequest("--state-share needs the size of a recurrent state; add --state-bytes")
    requests = read_trace(args.trace, page_size=args.page_size, salt_field=args.salt_field)
    replayed = replay(
        requests,
        args.num_pages,
        policy=args.policy,
        token_ms=args.token_ms if args.timed else None,
    )
    result = {
        "page_size": args.page_size,
        "policy": args.policy,
        "num_pages": args.num_pages or "inf",
        **replayed.to_json(),
    }
    print(
        f"{replayed.requests} requests ({replayed.skipped_requests} larger than the pool), "
        f"{replayed.prompt_pages} pages: {replayed.hit_pages} found ({replayed.hit_ratio:.2%}), "
        f"{replayed.evicted_pages} evicted, at most {replayed.peak_pages} in use"
    )
    if args.optimum:
        bound = optimal_hits(requests, args.num_pages or replayed.prompt_pages)
        result["optimal_hit_pages"] = bound
        print(f"a policy that knows the future would find {bound / max(replayed.prompt_pages, 1):.2%}")
    print(f"{replayed.pages_per_s:,.0f} pages per second")
    if args.state_bytes is not None:
        if args.page_bytes is None or args.num_pages is None:
            raise InvalidRequest(
                "--state-bytes needs the memory that pages and states share; add --page-bytes and --num-pages"
            )
        found = compare_states(
            requests,
            args.num_pages,
            page_bytes=args.page_bytes,
            state_bytes=args.state_bytes,
            shares=args.state_share or SHARES,
            sizes=(1,) if args.plot is None else SIZES,
        )
        print(render_states(found))
        result["states"] = [asdict(row) for row in found]
        if args.plot is not None:
            plot_states(found, args.plot)
    if args.compare or (args.plot is not None and args.state_bytes is None):
        made_up = {name: make(args.seed) for name, make in WORKLOADS.items()} if args.compare else {}
        rows = compare({args.trace.stem: requests, **made_up})
        print(render(rows))
        result["compared"] = [asdict(row) for row in rows]
        if args.plot is not None and args.state_bytes is None:
            plot([row for row in rows if row.workload == args.trace.stem], args.plot)
    if args.json:
        print_json(result)
    return 0


def _pages(text: str) -> int | None:
    return None if text == "inf" else positive(text)


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 < share < 1 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers between 0 and 1, like 0.25 or 0.1,0.5")
    return shares
