"""Options that several commands share: the engine's settings, logging, printing."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from octavo.block_manager import ResidualWindow
from octavo.block_manager.policies import POLICIES
from octavo.kernels.formats import FORMAT_NAMES, known_formats

from ..api.config import AsyncSteps, Backend, EngineConfig, Fairness, SchedulePolicy, Weights
from ..api.engine_info import ModelInfo
from ..api.sampling_params import Speculate
from .usage import checked

DEFAULTS = EngineConfig()
_SETTINGS = (
    "model", "revision", "served_model_name", "chat_template",
    "backend", "threads", "weights", "exact", "fuse", "kv_format", "k_format", "v_format",
    "sink_pages", "residual_pages", "quantize_after", "num_residual_pages",
    "page_size", "kv_memory", "num_pages", "state_memory", "max_model_len", "max_kv_size",
    "keep_tokens",
    "max_running", "max_waiting",
    "max_waiting_tokens", "queue_timeout", "max_unread_bytes", "stream_interval", "max_step_tokens",
    "target_itl", "refuse_late", "speculate", "draft_tokens", "async_steps", "prefix_cache", "cache_policy",
    "max_pinned_pages",
    "tenant_share", "fairness", "tenant_weights", "fairness_costs", "fairness_quantum", "schedule_policy",
    "cache_dir", "cache_dir_bytes", "save_dir",
)  # fmt: skip


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """One option per setting of EngineConfig. All default to None, so that a command can tell
    what was given; ``engine_config`` fills in the rest."""
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--model", metavar="PATH|HUB_ID|demo", help=f"what to serve ({DEFAULTS.model}: the embedded model)")
    add("--revision", metavar="R", help="branch, tag or commit of a Hugging Face id (its main branch)")
    add("--served-model-name", action=_Names, nargs="+", metavar="NAME",
        help="what clients call the model; further names are for HTTP (made of --model)")  # fmt: skip
    add("--chat-template", type=Path, metavar="FILE", help="Jinja template in the place of the model's own")
    add("--backend", choices=get_args(Backend), help="where kernels run (auto: the best there is)")
    add("--threads", type=int, metavar="N", help="CPU threads of the kernels (all this process may use)")
    add("--weights", choices=get_args(Weights), help="re-quantize the weights while loading (keep)")
    add("--exact", action="store_const", const=True, help="refuse paths that change the arithmetic")
    add("--no-fuse", dest="fuse", action="store_const", const=False, help="run the model's layers unfused")
    add_format_arguments(group)
    add_residual_arguments(group)
    add("--num-residual-pages", type=int, metavar="N", help="16-bit pages of each kind of layer (all of use)")
    add(
        "--page-size",
        "--block-size",
        type=int,
        metavar="N",
        help=f"positions per page ({DEFAULTS.page_size})",
    )
    pool = group.add_mutually_exclusive_group()
    pool.add_argument(
        "--kv-memory", "--kv-cache-memory-bytes", type=checked(memory_size), metavar="SIZE",
        help="memory of the page pool, such as 2GiB",
    )  # fmt: skip
    pool.add_argument(
        "--num-pages",
        "--num-gpu-blocks-override",
        type=int,
        metavar="N",
        help="size of the page pool in pages",
    )
    add("--state-memory", type=checked(memory_size), metavar="SIZE",
        help="memory for the states of recurrent layers (a share of the page pool's)")  # fmt: skip
    add("--max-model-len", type=int, metavar="N", help="longest sequence (the model's own limit)")
    add_attention_sink_arguments(group)
    add("--max-running", "--max-num-seqs", type=int, metavar="N",
        help=f"sequences computed at once ({DEFAULTS.max_running})")  # fmt: skip
    add("--max-waiting", type=int, metavar="N", help=f"requests that may queue ({DEFAULTS.max_waiting})")
    add("--max-waiting-tokens", type=int, metavar="N",
        help=f"prompt tokens that may queue ({DEFAULTS.max_waiting_tokens})")  # fmt: skip
    add("--queue-timeout", type=float, metavar="SECONDS",
        help="refuse a request that has not begun after this time (none)")  # fmt: skip
    add("--max-unread-bytes", type=checked(memory_size), metavar="SIZE",
        help="output that may wait for slow clients before new requests are refused (64MiB)")  # fmt: skip
    add("--stream-interval", type=int, metavar="N",
        help=f"tokens of a sample sent at once, after its first ({DEFAULTS.stream_interval})")  # fmt: skip
    add("--max-step-tokens", "--max-num-batched-tokens", type=int, metavar="N",
        help=f"tokens per step ({DEFAULTS.max_step_tokens})")  # fmt: skip
    add("--target-itl", type=_target_itl, metavar="MS|auto|off",
        help="cut prompts so that those who decode get a token within this time; auto: within three times "
        "what decoding takes, at least 25 and at most 200 ms (serve: auto; else off)")  # fmt: skip
    add(
        "--refuse-late",
        action="store_const",
        const=True,
        help="refuse requests at once whose first token is expected after their target_ttft (serve them)",
    )
    add("--speculate", choices=get_args(Speculate),
        help=f"guess the next tokens and check several in one step ({DEFAULTS.speculate})")  # fmt: skip
    add("--draft-tokens", type=int, metavar="N",
        help=f"tokens that are guessed at once, at most ({DEFAULTS.draft_tokens})")  # fmt: skip
    add("--async-steps", choices=get_args(AsyncSteps),
        help=f"submit a step while another is computed ({DEFAULTS.async_steps}: with Metal)")  # fmt: skip
    add("--no-prefix-cache", "--no-enable-prefix-caching", dest="prefix_cache", action="store_const",
        const=False, help="forget the pages of finished requests")  # fmt: skip
    add("--cache-policy", choices=POLICIES, help=f"which cached page goes first ({DEFAULTS.cache_policy})")
    add("--max-pinned-pages", type=int, metavar="N",
        help=f"pages that `octavo cache pin` may keep for good ({DEFAULTS.max_pinned_pages})")  # fmt: skip
    add("--tenant-share", type=float, metavar="SHARE",
        help="part of the queue, of pinned pages and of watch streams that one of several tenants may take "
        f"({DEFAULTS.tenant_share:g})")  # fmt: skip
    add_fairness_arguments(group)
    add("--cache-dir", type=Path, metavar="DIR", help="keep cached pages there, over restarts (they are not)")
    add("--cache-dir-bytes", type=checked(memory_size), metavar="SIZE", help="what they may take (10GiB)")
    add("--save-dir", type=Path, metavar="DIR", help="where `octavo cache save` may write (nowhere)")


def add_fairness_arguments(group: argparse._ActionsContainer) -> None:
    """Who is let in next; all default to None."""
    add = group.add_argument
    add("--fairness", choices=get_args(Fairness),
        help="between tenants: let in whoever has been served least; dlpm: what is cached first, within a "
        f"quantum ({DEFAULTS.fairness})")  # fmt: skip
    add("--tenant-weights", metavar="NAME=W,...", help="parts of the service under --fairness (1 each)")
    add("--fairness-costs", metavar="PROMPT/OUTPUT",
        help=f"cost of an uncached prompt token and an output one ({DEFAULTS.fairness_costs})")  # fmt: skip
    add("--fairness-quantum", type=float, metavar="COST",
        help=f"what dlpm serves a tenant in a row ({DEFAULTS.fairness_quantum:g})")  # fmt: skip
    add("--schedule-policy", choices=get_args(SchedulePolicy),
        help="without --fairness: the oldest first, or the longest cached prefix first, where nobody is "
        f"overtaken for long ({DEFAULTS.schedule_policy})")  # fmt: skip


class _Names(argparse.Action):
    """Several names after one option, or the option several times."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        _option: Any = None,
    ) -> None:
        setattr(namespace, self.dest, (*(getattr(namespace, self.dest) or ()), *values))


VLLM_FORMATS = {
    "auto": DEFAULTS.kv_format,
    "bfloat16": "bf16",
    "float16": "fp16",
}  # spellings of --kv-cache-dtype


def _formats(name: str) -> str:
    name = VLLM_FORMATS.get(name, name)
    if not known_formats(name):
        raise argparse.ArgumentTypeError(
            f"{name!r} is not a page format; use one of {', '.join(FORMAT_NAMES)}, or two as K/V"
        )
    return name


def _target_itl(text: str) -> float | str:
    if text in ("auto", "off"):
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither milliseconds nor auto or off") from None


def add_format_arguments(group: argparse._ActionsContainer) -> None:
    """--kv-format, and --k-format and --v-format for the halves; all default to None."""
    add = group.add_argument
    add("--kv-format", "--kv-cache-dtype", type=_formats, metavar="F|K/V",
        help=f"format of the KV pages, or those of K and V ({DEFAULTS.kv_format}); "
        f"one of {', '.join(FORMAT_NAMES)}")  # fmt: skip
    add("--k-format", choices=FORMAT_NAMES, help="format of K alone (that of --kv-format)")
    add("--v-format", choices=FORMAT_NAMES, help="format of V alone (that of --kv-format)")


def add_residual_arguments(group: argparse._ActionsContainer) -> None:
    """What is read in 16 bits beside quantized pages; all default to None."""
    add = group.add_argument
    add("--sink-pages", type=int, metavar="N",
        help=f"read the first pages of a sequence in 16 bits ({DEFAULTS.sink_pages})")  # fmt: skip
    add("--residual-pages", type=int, metavar="N",
        help="and the last ones; 1: the page being written (none; 1 beside one of the others)")  # fmt: skip
    add("--quantize-after", type=int, metavar="TOKENS",
        help="read sequences up to this long in 16 bits alone; requests may have their own number "
        f"({DEFAULTS.quantize_after})")  # fmt: skip


def add_attention_sink_arguments(group: argparse._ActionsContainer) -> None:
    """What a token sees of a long sequence; all default to None."""
    add = group.add_argument
    add("--max-kv-size", type=int, metavar="N",
        help="positions that a token sees; sequences may then outgrow the model (all)")  # fmt: skip
    add("--keep-tokens", type=int, metavar="N", help="first positions among these, as attention sinks (4)")


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The engine settings that were given on the command line."""
    return {name: value for name in _SETTINGS if (value := getattr(args, name)) is not None}


def engine_flags(settings: Mapping[str, Any]) -> list[str]:
    """The command line that gives these settings: ``given_settings`` the other way round."""
    flags = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append(flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, str(value)]
    return flags


def engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The engine's configuration; InvalidConfig names what is not usable.

    defaults   a command's own, for settings that were not given
    """
    return EngineConfig(**defaults | given_settings(args))


def memory_size(text: str) -> int:
    """Bytes of a size such as 2GiB; InvalidConfig for what is none."""
    from ..memory.budget import parse_size

    return parse_size(text)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="make the last line of the output one JSON object"
    )


def add_log_level_argument(parser: argparse.ArgumentParser, default: str) -> None:
    levels = ("debug", "info", "warning", "error", "critical")
    parser.add_argument(
        "--log-level", choices=levels, default=default, type=str.lower, help="what to log on stderr"
    )


def set_up_logging(args: argparse.Namespace) -> None:
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def _windows(info: ModelInfo) -> str:
    """Pages of layers that have pools of their own, because they see a window only, and 16-bit pages."""
    return "".join(
        f"{group.num_pages} for windows of {group.window}, "
        if not isinstance(group, ResidualWindow)
        else f"{group.num_pages} of 16 bits, "
        for group in info.groups[1:]
    )


def _states(info: ModelInfo) -> str:
    """Slots of recurrent layers, where there are any."""
    from ..memory.budget import format_size

    if info.states is None:
        return ""
    each = format_size(info.states.slot_bytes)
    return f"states {format_size(info.memory.states)} ({info.states.num_slots} slots of {each}), "


def print_json(value: Mapping[str, Any]) -> None:
    """The last line of a command's output."""
    print(json.dumps(value), flush=True)


def budget_lines(info: ModelInfo) -> list[str]:
    """What a started engine is and where its memory goes, for people."""
    from ..memory.budget import format_size

    memory = info.memory
    total = memory.weights + memory.pages + memory.workspace + memory.states
    return [
        f"model {info.name} ({info.architecture}, {info.num_layers} layers, {info.weights} weights), "
        f"{info.tier} tier, length up to {info.max_model_len}"
        + (f"; recurrent layers {info.state_tier}" if info.state_tier else ""),
        f"backend {info.backend} with {info.threads} threads: {info.backend_reason}",
        f"memory {format_size(total)}: weights {format_size(memory.weights)}, "
        f"pages {format_size(memory.pages)} ({info.num_pages} of {info.page_size} positions, {_windows(info)}"
        f"{info.kv_format}), {_states(info)}workspace {format_size(memory.workspace)}",
    ]
