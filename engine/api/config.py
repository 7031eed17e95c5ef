from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from octavo.kernels.formats import FORMAT_NAMES, FormatPair, format_pair, known_formats
from octavo.kernels.residual import RESIDUAL_SETTINGS, SIXTEEN_BITS, ResidualSpec, default_residual_pages

from .errors import InvalidConfig
from .sampling_params import Speculate
from .setting import setting, take_settings
from .setting_types import split_pair

AUTO = "auto"
CHOSEN_FROM = (
    "fp4",
    "fp5/fp4",
    "int8/fp4",
    "int8",
)
Backend = Literal["auto", "metal", "cpu", "reference"]
Weights = Literal["keep", "bf16", "int8", "w8a8", "int4", "w4a8"]
SchedulePolicy = Literal["fcfs", "lpm", "vtc", "dlpm"]

MAX_DRAFTS = 8  # draft tokens of one sequence in a step
MAX_WAITING_TOKENS = 2**20  # limit on prompt tokens in the queue
SINK_TOKENS = 4
DEFAULT_LORA_MEMORY = 1 << 30  # bytes
MIN_TENANT_WEIGHT = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine. Each has a default, a type, a range and a help text."""

    model: str = setting(
        "demo", "model to serve: a folder, a GGUF file, a Hugging Face id, or one of the two embedded "
        "models: demo, and demo-hybrid with recurrent layers", metavar="PATH|HUB_ID|demo|demo-hybrid",
    )  # fmt: skip
    revision: str | None = setting(
        None, "branch, tag or commit of a Hugging Face id", shown="its main branch", metavar="R"
    )
    served_model_name: tuple[str, ...] = setting(
        (), "names by which clients may request the model; gRPC reports only the first name",
        shown="derived from --model", kind="names", metavar="NAME",
    )  # fmt: skip
    chat_template: Path | None = setting(
        None, "file with a Jinja chat template that replaces the model's own", shown="", kind="path",
        metavar="FILE",
    )  # fmt: skip
    backend: Backend = setting(
        "auto", "kernels that compute attention and linear layers", shown="auto, the fastest that passes its "
        "self-test", choices=get_args(Backend),
    )  # fmt: skip
    threads: int | None = setting(
        None, "number of CPU threads for the kernels", shown="all that this process may use", kind="int",
        metavar="N", low=1,
    )  # fmt: skip
    weights: Weights = setting(
        "keep", "number format to which weights are quantized while loading", choices=get_args(Weights),
        more="w8a8 stores 8 bits with one scale per output channel. w4a8 stores 4 bits; each group of "
        "weights has a scale, a small multiple of the channel's scale. CPUs with AVX-512 then quantize "
        "activations too, with one scale per token.",
    )  # fmt: skip
    exact: bool = setting(
        False, "refuse kernels and formats with less precision than the number format of the checkpoint",
        shown="", kind="switch",
    )  # fmt: skip
    reasoning_parser: str = setting(
        "auto", "parser that separates reasoning from the answer, such as qwen3, deepseek_r1 or gpt_oss; "
        "auto detects it from the chat template and the vocabulary, none turns it off", metavar="NAME",
    )  # fmt: skip
    tool_call_parser: str = setting(
        "auto", "parser of the model's tool calls, such as json_tools (hermes), qwen3_coder or mistral; "
        "auto detects it from the chat template, none leaves tool calls in the text", metavar="NAME",
    )  # fmt: skip
    tensor_parallel: int = setting(
        1, "number of processes that share the model by tensor parallelism: each computes a part of the "
        "heads of every layer", kind="int", metavar="N", low=1, aliases=("--tensor-parallel-size",),
    )  # fmt: skip
    pipeline_parallel: int = setting(
        1, "number of processes that share the model by pipeline parallelism: each computes a part of the "
        "layers", kind="int", metavar="N", low=1, aliases=("--pipeline-parallel-size",),
    )  # fmt: skip
    kv_format: str = setting(
        "bf16", "format of KV pages, or two formats as K/V, for keys and for values; auto chooses one. "
        f"Formats: {', '.join(FORMAT_NAMES)}", kind="formats", metavar="F|K/V|auto", more="auto measures "
        f"{', '.join(CHOSEN_FROM)} on a short text at load. It takes the smallest format that changes "
        "predictions by less than 1 %, or bf16 if none does.", aliases=("--kv-cache-dtype",),
    )  # fmt: skip
    sink_pages: int = setting(
        0, "for quantized formats: number of pages at the start of each sequence that are also stored in 16 "
        "bits", kind="int", metavar="N", low=0, remedy="0 keeps no 16-bit pages",
    )  # fmt: skip
    residual_pages: int | None = setting(
        None, "for quantized formats: number of pages at the end of each sequence that are also stored in 16 "
        "bits; 1 stores only the page being written", shown="2 if K or V has 5 bits or less, else 0, but at "
        "least 1 with --sink-pages or --quantize-after", kind="int", metavar="N", low=0, remedy="0 keeps no "
        "16-bit pages", more="The default is 2 if K or V has 5 bits or less, else 0. It is at least 1 if "
        "sink_pages or quantize_after is set, and 0 for models without KV pages.",
    )  # fmt: skip
    quantize_after: int = setting(
        0, "for quantized formats: sequences of at most this many tokens keep all of their KV in 16 bits",
        kind="int", metavar="TOKENS", low=0, remedy="0 keeps no 16-bit pages",
    )  # fmt: skip
    page_size: int = setting(
        32, "number of positions per page", kind="int", metavar="N", low=1, aliases=("--block-size",)
    )
    kv_memory: int | None = setting(
        None, "memory of the page pool, such as 2GiB", shown="a share of the machine's", kind="size",
        metavar="SIZE", low=1, exclusive="pool", aliases=("--kv-cache-memory-bytes",),
    )  # fmt: skip
    num_pages: int | None = setting(
        None, "size of the page pool in pages; set this or --kv-memory", shown="", kind="int", metavar="N",
        low=1, exclusive="pool", aliases=("--num-gpu-blocks-override",),
    )  # fmt: skip
    state_memory: int | None = setting(
        None, "memory for states of recurrent layers, such as 512MiB", shown="a share of --kv-memory",
        kind="size", metavar="SIZE", low=1,
    )  # fmt: skip
    max_model_len: int | None = setting(
        None, "maximum length of a sequence, prompt and output, in tokens", shown="the model's own limit",
        kind="int", metavar="N", low=1,
    )  # fmt: skip
    max_kv_size: int | None = setting(
        None, f"limit attention to N positions: the first {SINK_TOKENS} and the latest ones",
        shown="no limit", kind="int", metavar="N", low=SINK_TOKENS + 1, more="Sliding windows do not change. "
        "With this option, sequences may be longer than the model's maximum length.",
    )  # fmt: skip
    cut_max_tokens: bool = setting(
        False, "if prompt and max_tokens of a request exceed the maximum length, lower max_tokens instead of "
        "refusing the request", shown="", kind="switch",
    )  # fmt: skip
    max_running: int = setting(
        64, "maximum number of sequences in a step", kind="int", metavar="N", low=1,
        aliases=("--max-num-seqs",),
    )  # fmt: skip
    max_step_tokens: int = setting(
        512, "maximum number of tokens in a step, counting decode tokens and prompt chunks", kind="int",
        metavar="N", low=1, aliases=("--max-num-batched-tokens",),
    )  # fmt: skip
    target_itl: float | Literal["auto", "off"] = setting(
        "off", "target inter-token latency in milliseconds; prefill chunks are sized to keep it; auto: three "
        "times the duration of a decode step, between 25 and 200 ms", shown="auto in octavo serve, else off",
        kind="milliseconds", metavar="MS|auto|off",
        more="off: prefill chunks may fill a step up to --max-step-tokens.",
    )  # fmt: skip
    max_waiting: int = setting(
        1024, "maximum number of requests in the queue; more are refused", kind="int", metavar="N", low=1,
        more=f"All queued prompts together may have {MAX_WAITING_TOKENS} tokens; if the queue is empty, a "
        "prompt of any length is accepted.",
    )  # fmt: skip
    queue_timeout: float | None = setting(
        None, "maximum time that a request waits in the queue before it is refused", shown="none",
        kind="float", metavar="SECONDS", low=0, above=True, remedy="leave it out for no limit",
    )  # fmt: skip
    speculate: str = setting(
        "off", "source of draft tokens for speculative decoding, which verifies several tokens in one step",
        metavar="off|auto|ngram|suffix|mtp|draft:PATH", more="The engine drafts only while measured "
        "acceptance and step times show a gain. auto: ngram if native CPU kernels compute every layer and no "
        "layer is recurrent, else off. ngram: tokens that followed an earlier occurrence of the latest "
        "tokens. suffix: like ngram, but also searches the tenant's recent outputs. mtp: the checkpoint's "
        "head for multi-token prediction. draft:PATH: a draft model. mtp and draft models take pages from "
        "--kv-memory. A request may choose another source.",
    )  # fmt: skip
    async_steps: bool | None = setting(
        None, "submit the next step to the device before the current one has finished", shown="yes on Metal, "
        "else no", kind="switch", more="Outputs do not change. A step still waits if its batch depends on "
        "tokens of the current step. With this option the native CPU backend builds a graph for each step "
        "instead of replaying captured programs.", aliases=("--async-scheduling",),
    )  # fmt: skip
    prefix_cache: bool = setting(
        True, "reuse pages of earlier requests with the same prefix", shown="yes", kind="switch",
        aliases=("--enable-prefix-caching",),
    )  # fmt: skip
    max_pinned_pages: int = setting(
        0, "maximum number of pages that `octavo cache pin` may protect from eviction", kind="int",
        metavar="N", low=0, remedy="0 refuses every pin", needs="prefix_cache",
    )  # fmt: skip
    schedule_policy: SchedulePolicy = setting(
        "fcfs", "order in which waiting requests are admitted: fcfs: oldest first; lpm: longest cached "
        "prefix first; vtc: least served tenant first; dlpm: longest cached prefix first among tenants with "
        "about equal service", choices=get_args(SchedulePolicy), aliases=("--fairness",),
    )  # fmt: skip
    tenant_weights: str = setting(
        "", "weights of tenants for --schedule-policy vtc and dlpm: a tenant of weight 2 gets twice the "
        "service of a tenant of weight 1", shown="1 for each tenant", metavar="NAME=W,...",
    )  # fmt: skip
    cache_dir: Path | None = setting(
        None, "folder on disk for cached pages, so that they survive a restart", shown="none",
        kind="path", metavar="DIR", needs="prefix_cache",
    )  # fmt: skip
    cache_dir_bytes: int | None = setting(
        None, "maximum size of --cache-dir, shared by all servers that use it", shown="10GiB", kind="size",
        metavar="SIZE", low=1, needs="cache_dir",
    )  # fmt: skip
    remote_cache: str | None = setting(
        None, "Redis, Valkey or Mooncake store for cached pages, which several machines can share",
        shown="none", metavar="URL", needs="prefix_cache",
    )  # fmt: skip
    swap_memory: int = setting(
        0, "host memory for pages of preempted requests; pages are copied back if that is faster than "
        "recomputing them", shown="none", kind="size", metavar="SIZE", low=0, needs="prefix_cache",
    )  # fmt: skip
    lora_modules: tuple[str, ...] = setting(
        (), "LoRA adapters to load at start; requests select an adapter by its NAME", shown="none",
        kind="pairs", metavar="NAME=PATH",
    )  # fmt: skip
    max_loras: int = setting(
        8, "maximum number of different LoRA adapters in a step", kind="int", metavar="N", low=1,
        more="More adapters may be loaded. A request whose adapter has no free slot waits, and later "
        "requests may overtake it.",
    )  # fmt: skip
    max_lora_rank: int = setting(64, "maximum rank of a LoRA adapter", kind="int", metavar="N", low=1)
    lora_memory: int | None = setting(
        None, "memory for LoRA adapters, such as 512MiB", shown="1GiB with --lora-modules or --lora-dir, "
        "else none", kind="size", metavar="SIZE", low=1,
    )  # fmt: skip
    lora_tenants: tuple[str, ...] = setting(
        (), "pairs of a LoRA adapter and a tenant that may use it; an adapter without a pair is open to all "
        "tenants", shown="none", kind="pairs", metavar="NAME=TENANT",
    )  # fmt: skip
    lora_dir: Path | None = setting(
        None, "folder from which operators may load LoRA adapters while the server runs", shown="none",
        kind="path", metavar="DIR",
    )  # fmt: skip
    vision: bool = setting(
        False, "accept images in chats, if the model has a vision part; needs pip install '.[vision]'",
        shown="", kind="switch",
    )  # fmt: skip
    max_image_pixels: int = setting(
        1024 * 1024, "maximum number of pixels of an image; larger images are shrunk; a lower limit of the "
        "model still applies", kind="int", metavar="N", low=1, needs="vision",
    )  # fmt: skip
    save_dir: Path | None = setting(
        None, "folder that `octavo cache save` writes to and `octavo cache load` reads from", shown="none",
        kind="path", metavar="DIR",
    )  # fmt: skip

    def __post_init__(self) -> None:
        take_settings(self, InvalidConfig)
        if self.speculate not in (*get_args(Speculate), "auto", "mtp") and not self.draft_model:
            raise InvalidConfig(
                f"speculate must be auto, {', '.join(get_args(Speculate))}, mtp or draft:PATH, "
                f"got {self.speculate!r}"
            )
        if any(not name.strip() or not name.isprintable() for name in self.served_model_name):
            raise InvalidConfig(
                f"served_model_name must be printable names, got {list(self.served_model_name)}"
            )
        if self.kv_format != AUTO and not known_formats(self.kv_format):
            raise InvalidConfig(
                f"kv_format must be one of {', '.join(FORMAT_NAMES)}, auto, or two, written K/V, "
                f"got {self.kv_format!r}"
            )
        if self.target_itl not in ("auto", "off") and not (
            not isinstance(self.target_itl, str) and self.target_itl > 0
        ):
            raise InvalidConfig(
                f"target_itl must be above 0 milliseconds, 'auto' or 'off', got {self.target_itl!r}"
            )
        self._check_residual()
        self._check_ranks()
        self._check_fairness()
        _ = self.lora_paths
        if self.page_size > 1024 or self.page_size & (self.page_size - 1):
            raise InvalidConfig(f"page_size must be a power of two up to 1024, got {self.page_size}")
        if self.cache_dir is not None and self.remote_cache is not None:
            raise InvalidConfig(
                "remote_cache must be left out with cache_dir, got both; give only one of them"
            )
        if self.kv_memory is not None and self.num_pages is not None:
            raise InvalidConfig("kv_memory and num_pages both set the size of the pool; give one of them")
        if self.max_step_tokens < self.max_running:
            raise InvalidConfig(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running "
                f"({self.max_running}), or a full decode batch would not fit in one step; raise "
                "max_step_tokens or lower max_running"
            )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_setting(self) -> str:
        return "pipeline_parallel" if self.pipeline_parallel > 1 else "tensor_parallel"

    def _check_ranks(self) -> None:
        if self.num_ranks == 1:
            return
        if self.tensor_parallel > 1 and self.pipeline_parallel > 1:
            raise InvalidConfig(
                f"pipeline_parallel must be 1 with tensor_parallel={self.tensor_parallel}, got "
                f"{self.pipeline_parallel}; set one of them to 1"
            )
        if self.async_steps:
            raise InvalidConfig(
                f"async_steps must be left out with {self.ranks_setting}, which does not support it yet, got "
                f"{self.ranks_setting}={self.num_ranks}; leave out one of the two"
            )

    def _check_fairness(self) -> None:
        smallest = min([1.0, *self.tenant_weight_by_name.values()])
        if smallest < MIN_TENANT_WEIGHT:
            raise InvalidConfig(
                f"tenant_weights must be at least {MIN_TENANT_WEIGHT:g} each, got {smallest:g}; raise it"
            )
        if self.tenant_weights and not self.is_fair:
            raise InvalidConfig(
                f"tenant_weights must be left out if schedule_policy is {self.schedule_policy}, got "
                f"{self.tenant_weights}; set schedule_policy to vtc or dlpm, too"
            )

    @property
    def is_fair(self) -> bool:
        return self.schedule_policy in ("vtc", "dlpm")

    @property
    def draft_model(self) -> str | None:
        kind, _, path = self.speculate.partition(":")
        return path or None if kind == "draft" else None

    @property
    def tenant_weight_by_name(self) -> dict[str, float]:
        """Parse ``tenant_weights``. Raises InvalidConfig for an entry that is not NAME=WEIGHT."""
        weights = {}
        for part in filter(None, self.tenant_weights.split(",")):
            name, _, text = part.partition("=")
            weight = _positive(text)
            if not name or weight is None:
                raise InvalidConfig(
                    f"tenant_weights must be NAME=WEIGHT,..., with weights above 0, got {part!r}; "
                    "alice=2 gives alice twice the service of others"
                )
            weights[name] = weight
        return weights

    @property
    def lora_paths(self) -> dict[str, Path]:
        """Map each name in ``lora_modules`` to its folder. Raises InvalidConfig for a duplicate name."""
        paths: dict[str, Path] = {}
        for name, path in map(split_pair, self.lora_modules):
            if name in paths:
                raise InvalidConfig(f"lora_modules must have names that differ, got {name!r} twice; drop one")
            paths[name] = Path(path)
        return paths

    @property
    def lora_tenants_by_name(self) -> dict[str, tuple[str, ...]]:
        tenants: dict[str, tuple[str, ...]] = {}
        for name, tenant in map(split_pair, self.lora_tenants):
            tenants[name] = (*tenants.get(name, ()), tenant)
        return tenants

    @property
    def lora_bytes(self) -> int:
        """Memory for adapters in bytes; 0 if adapters are off."""
        if self.lora_memory is None and (self.lora_modules or self.lora_dir is not None):
            return DEFAULT_LORA_MEMORY
        return self.lora_memory or 0

    def _check_residual(self) -> None:
        for name in RESIDUAL_SETTINGS:
            if (value := getattr(self, name)) and self.has_exact_pages:
                raise InvalidConfig(
                    f"{name} is {value}, but all pages of {self.page_formats} are 16-bit pages; choose a "
                    f"smaller kv_format, or leave {name} out"
                )

    @property
    def residual(self) -> ResidualSpec | None:
        pages = self.residual_pages
        if pages is None:
            pages = default_residual_pages(self.page_formats.k, self.page_formats.v)
        if not (self.sink_pages or pages or self.quantize_after):
            return None
        return ResidualSpec(
            sink_pages=self.sink_pages,
            residual_pages=max(pages, 1),
            quantize_after=self.quantize_after,
        )

    @property
    def residual_is_optional(self) -> bool:
        return self.residual_pages is None and not (self.sink_pages or self.quantize_after)

    @property
    def has_exact_pages(self) -> bool:
        return {self.page_formats.k, self.page_formats.v} <= set(SIXTEEN_BITS)

    def with_format(self, name: str) -> EngineConfig:
        kept = self.without_residual() if name in SIXTEEN_BITS else self
        return replace(kept, kv_format=name)

    def without_residual(self) -> EngineConfig:
        return replace(self, sink_pages=0, residual_pages=0, quantize_after=0)

    @property
    def page_formats(self) -> FormatPair:
        name = CHOSEN_FROM[0] if self.kv_format == AUTO else self.kv_format
        return format_pair(name)


def checked(config: object) -> EngineConfig:
    """Return ``config`` if it is an EngineConfig; raise InvalidConfig otherwise."""
    if not isinstance(config, EngineConfig):
        example = repr(config) if isinstance(config, str) else "'demo'"
        raise InvalidConfig(
            f"config must be an EngineConfig, got {config!r}; write EngineConfig(model={example})"
        )
    return config


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
