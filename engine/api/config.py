"""Everything an engine is started with: frozen, keyword-only, validated across fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from octavo.block_manager.policies import DEFAULT_POLICY, POLICIES
from octavo.kernels.formats import FORMAT_NAMES, FormatPair, format_pair, known_formats
from octavo.kernels.residual import SIXTEEN_BITS, ResidualSpec

from .errors import InvalidConfig
from .sampling_params import Speculate

Backend = Literal["auto", "metal", "cpu", "reference"]
Weights = Literal["keep", "bf16", "int8", "int4"]
Fairness = Literal["off", "vtc", "dlpm"]
AsyncSteps = Literal["on", "off", "auto"]
SchedulePolicy = Literal["fcfs", "lpm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Names and defaults are those of ``octavo serve``.

    model             "demo" (the embedded one), a folder, or a Hugging Face id
    revision          branch, tag or commit of a Hugging Face id (None: its main branch)
    served_model_name what clients are told the model is, and further names they may use over HTTP
                      (none: a name made of ``model``)
    chat_template     a Jinja file in the place of the model's own template
    backend           where attention and linear layers run; "auto" takes the best there is
    threads           CPU threads of the native kernels (None: all this process may use)
    weights           "keep", or re-quantize while loading
    exact             refuse paths that round activations or weights below the precision they come in
    fuse              allow fusions that the load-time parity probe has accepted
    kv_format         page format of K and V, or two as "K/V"
    k_format          of K alone, where it is another (None: kv_format)
    v_format          of V alone
    sink_pages        first pages of each sequence that are read in 16 bits, where the others are quantized
    residual_pages    last pages, the one being written included, that are read so (0: none, unless one of
                      the two beside it asks for 16-bit pages; then the one being written is)
    quantize_after    tokens up to which a sequence is read in 16 bits alone; a request may have its own
    num_residual_pages  16-bit pages of each kind of layer (None: all of use, within the same memory)
    page_size         positions per page
    kv_memory         bytes for the page pool (None: a share of the machine's memory)
    num_pages         pages of the pool; give this or kv_memory
    state_memory      bytes for the states of recurrent layers (None: a share of kv_memory, or of what it
                      stands for)
    max_model_len     positions a sequence may have (None: the model's own limit)
    max_kv_size       positions that a token sees in layers without a window of their own: the latest, and
                      the first keep_tokens; sequences may then outgrow the model's limit (None: all)
    keep_tokens       first positions that stay visible (attention sinks) under max_kv_size (None: 4)
    max_running       sequences computed at once
    max_step_tokens   tokens computed per step, decodes and prompt chunks together
    target_itl        milliseconds between two tokens of a sequence: prompts are computed in chunks that are
                      predicted to keep it while somebody decodes ("auto": three times what decoding takes
                      by itself, at least 25 and at most 200; "off": chunks of max_step_tokens)
    max_waiting       requests that may queue behind the running ones; more are refused (Overloaded)
    refuse_late       refuse a request at once whose first token is expected after its target_ttft
    max_waiting_tokens  prompt tokens that may queue; one prompt may always (None: any number)
    queue_timeout     seconds that a request may wait to be begun (None: any time)
    max_unread_bytes  output, about, in bytes of memory, that may wait for slow clients; new requests are
                      refused beyond that, and twice of it ends the slowest streams
    stream_interval   tokens of a sample that are handed over at once, its first and last ones at any time
    speculate         what guesses the next tokens of a sequence, to check several in one step: "off",
                      "ngram" (what followed the last tokens before) or "suffix" (the same, also in the
                      tenant's recent outputs); a request may have its own
    draft_tokens      tokens that are guessed at once, at most
    async_steps       submit the next token of everybody before the step that is computed has ended, where
                      nothing depends on its tokens but what follows them; outputs are the same ("auto":
                      where it gains, which is on the Metal backend)
    prefix_cache      keep finished pages findable by their contents
    cache_policy      which cached page is given up first: "lru", "lfu" or "gittins"
    max_pinned_pages  pages that pins may keep; no sequence may need them (0: nothing can be pinned)
    tenant_share    part of the queue, of the pinned pages and of the watch streams that one tenant may
                    take, where there are several
    fairness          between tenants, inside a priority: "vtc" lets in whoever has been served least, "dlpm"
                      does so by quanta, and what is cached first inside them
    tenant_weights    "alice=2,batch=0.5": parts of the service under fairness (others: 1)
    fairness_costs    "1/2": what a prompt token that was not cached and a generated token count
    fairness_quantum  under "dlpm", what a tenant may be served in a row, in these costs
    schedule_policy   without fairness, who is let in next: the oldest ("fcfs"), or the one with the longest
                      cached prefix ("lpm"), within a bound on being overtaken
    cache_dir         where cached pages persist (None: they do not)
    cache_dir_bytes   what they may take there, all servers that use the folder together
    save_dir          where `octavo cache save` may write, and load from (None: nowhere)
    """

    model: str = "demo"
    revision: str | None = None
    served_model_name: tuple[str, ...] = ()
    chat_template: Path | None = None
    backend: Backend = "auto"
    threads: int | None = None
    weights: Weights = "keep"
    exact: bool = False
    fuse: bool = True
    kv_format: str = "bf16"
    k_format: str | None = None
    v_format: str | None = None
    sink_pages: int = 0
    residual_pages: int = 0
    quantize_after: int = 0
    num_residual_pages: int | None = None
    page_size: int = 32
    kv_memory: int | None = None
    num_pages: int | None = None
    state_memory: int | None = None
    max_model_len: int | None = None
    max_kv_size: int | None = None
    keep_tokens: int | None = None
    max_running: int = 64
    max_step_tokens: int = 512
    target_itl: float | Literal["auto", "off"] = "off"
    refuse_late: bool = False
    max_waiting: int = 1024
    max_waiting_tokens: int | None = 2**20
    queue_timeout: float | None = None
    max_unread_bytes: int = 64 * 1024**2
    stream_interval: int = 1
    speculate: Speculate = "off"
    draft_tokens: int = 8
    async_steps: AsyncSteps = "auto"
    prefix_cache: bool = True
    cache_policy: str = DEFAULT_POLICY
    max_pinned_pages: int = 0
    tenant_share: float = 0.5
    fairness: Fairness = "off"
    tenant_weights: str = ""
    fairness_costs: str = "1/2"
    fairness_quantum: float = 4096.0
    schedule_policy: SchedulePolicy = "fcfs"
    cache_dir: Path | None = None
    cache_dir_bytes: int = 10 * 1024**3
    save_dir: Path | None = None

    def __post_init__(self) -> None:
        """Raise InvalidConfig naming the first setting, or pair, that is not usable."""
        for name, allowed in (
            ("backend", get_args(Backend)),
            ("weights", get_args(Weights)),
            ("fairness", get_args(Fairness)),
            ("schedule_policy", get_args(SchedulePolicy)),
            ("speculate", get_args(Speculate)),
            ("async_steps", get_args(AsyncSteps)),
        ):
            if getattr(self, name) not in allowed:
                raise InvalidConfig(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )
        if any(not name.strip() or not name.isprintable() for name in self.served_model_name):
            raise InvalidConfig(
                f"served_model_name must be names that can be printed, got {list(self.served_model_name)}"
            )
        if not known_formats(self.kv_format):
            raise InvalidConfig(
                f"kv_format must be one of {', '.join(FORMAT_NAMES)}, or two as K/V, got {self.kv_format!r}"
            )
        for name in ("k_format", "v_format"):
            value = getattr(self, name)
            if value is not None and value not in FORMAT_NAMES:
                raise InvalidConfig(f"{name} must be one of {', '.join(FORMAT_NAMES)}, got {value!r}")
        if self.cache_policy not in POLICIES:
            raise InvalidConfig(
                f"cache_policy must be one of {', '.join(POLICIES)}, got {self.cache_policy!r}"
            )
        if self.max_pinned_pages < 0:
            raise InvalidConfig(
                f"max_pinned_pages must be at least 0, got {self.max_pinned_pages}; 0 refuses every pin"
            )
        if not 0 < self.tenant_share <= 1:
            raise InvalidConfig(
                f"tenant_share must be above 0 and at most 1, got {self.tenant_share}; 1 lets one "
                "tenant take all"
            )
        if self.queue_timeout is not None and not self.queue_timeout > 0:
            raise InvalidConfig(
                f"queue_timeout must be above 0 seconds, got {self.queue_timeout}; leave it out for none"
            )
        if self.target_itl not in ("auto", "off") and not (
            isinstance(self.target_itl, float | int) and self.target_itl > 0
        ):
            raise InvalidConfig(
                f"target_itl must be above 0 milliseconds, 'auto' or 'off', got {self.target_itl!r}"
            )
        counts = (
            "threads",
            "kv_memory",
            "num_pages",
            "state_memory",
            "num_residual_pages",
            "max_model_len",
            "max_waiting_tokens",
        )
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {value}; leave it out for the default")
        for name in (
            "page_size", "max_running", "max_step_tokens", "max_waiting", "stream_interval",
            "max_unread_bytes", "cache_dir_bytes", "draft_tokens",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {getattr(self, name)}")
        self._check_residual()
        self._check_streaming()
        self._check_fairness()
        if self.page_size > 1024 or self.page_size & (self.page_size - 1):
            raise InvalidConfig(f"page_size must be a power of two up to 1024, got {self.page_size}")
        if self.cache_dir is not None and not self.prefix_cache:
            raise InvalidConfig(
                "cache_dir keeps what the prefix cache publishes, and prefix_cache is off; drop one of them"
            )
        if self.kv_memory is not None and self.num_pages is not None:
            raise InvalidConfig("kv_memory and num_pages both set the size of the pool; give one of them")
        if self.max_step_tokens < self.max_running:
            raise InvalidConfig(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running "
                f"({self.max_running}), or a full decode batch would not fit in one step; raise the first "
                "or lower the second"
            )

    def _check_streaming(self) -> None:
        if self.keep_tokens is not None and self.max_kv_size is None:
            raise InvalidConfig(
                f"keep_tokens is {self.keep_tokens}, but without max_kv_size every position stays visible; "
                "give max_kv_size, or leave it out"
            )
        if self.max_kv_size is not None and not 0 <= self.num_kept_tokens < self.max_kv_size:
            raise InvalidConfig(
                f"max_kv_size must be more than the {self.num_kept_tokens} keep_tokens, which must be at "
                f"least 0, got {self.max_kv_size}; raise the first or lower the second"
            )

    def _check_fairness(self) -> None:
        _ = self.tenant_weight_by_name, self.cost_per_token
        if not 0 < self.fairness_quantum < float("inf"):
            raise InvalidConfig(
                f"fairness_quantum must be above 0, got {self.fairness_quantum}; 4096 is some prompts"
            )
        if self.schedule_policy != "fcfs" and self.fairness != "off":
            raise InvalidConfig(
                f"schedule_policy {self.schedule_policy} and fairness {self.fairness} both say who is next; "
                'drop one of them ("dlpm" orders by what is cached, too)'
            )
        if self.tenant_weights and self.fairness == "off":
            raise InvalidConfig(
                f'tenant_weights is {self.tenant_weights!r}, but fairness is off; set it to "vtc", or leave '
                "the weights out"
            )

    @property
    def tenant_weight_by_name(self) -> dict[str, float]:
        """``tenant_weights`` as numbers. InvalidConfig for one that is none."""
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
    def cost_per_token(self) -> tuple[float, float]:
        """``fairness_costs`` as numbers: of a prompt token and of a generated one."""
        prompt, _, output = self.fairness_costs.partition("/")
        costs = _positive(prompt), _positive(output)
        if costs[0] is None or costs[1] is None:
            raise InvalidConfig(
                f"fairness_costs must be two numbers above 0 as PROMPT/OUTPUT, got {self.fairness_costs!r}; "
                "1/2 counts a generated token as two of a prompt"
            )
        return costs[0], costs[1]

    @property
    def num_kept_tokens(self) -> int:
        """Under max_kv_size; four sinks are what window attention needs to stay stable."""
        return 4 if self.keep_tokens is None else self.keep_tokens

    def _check_residual(self) -> None:
        for name in ("sink_pages", "residual_pages", "quantize_after"):
            if (value := getattr(self, name)) < 0:
                raise InvalidConfig(f"{name} must be at least 0, got {value}; 0 asks for no 16-bit pages")
            if value and {self.page_formats.k, self.page_formats.v} <= set(SIXTEEN_BITS):
                raise InvalidConfig(
                    f"{name} is {value}, but all pages of {self.page_formats} are 16-bit pages; give a "
                    "smaller kv_format, or leave it out"
                )
        if self.num_residual_pages is not None and self.residual is None:
            raise InvalidConfig(
                f"num_residual_pages is {self.num_residual_pages}, but nothing asks for 16-bit pages; set "
                "residual_pages to 1, or leave it out"
            )

    @property
    def residual(self) -> ResidualSpec | None:
        """What is read in 16 bits beside quantized pages; None: there are pages of one kind."""
        if not (self.sink_pages or self.residual_pages or self.quantize_after):
            return None
        return ResidualSpec(
            sink_pages=self.sink_pages,
            residual_pages=max(self.residual_pages, 1),
            quantize_after=self.quantize_after,
        )

    @property
    def page_formats(self) -> FormatPair:
        """Of K and of V, as the pool stores them."""
        return format_pair(self.kv_format, k_format=self.k_format, v_format=self.v_format)


def _positive(text: str) -> float | None:
    """A finite number above 0; None where the text is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
