from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from ..api import config as settings
from ..api.config import EngineConfig
from ..api.engine_request import EngineRequest
from ..api.errors import (
    EngineStopping,
    InvalidRequest,
    Overloaded,
    QueueTimeout,
    RequestTooLong,
)
from ..api.output_collector import prompt_logprobs_bytes
from ..api.stats import Gauges
from ..api.tenant import Tenant

MAX_UNREAD_BYTES = 64 * 1024**2  # bytes; above this limit, new requests are refused
MAX_UNREAD_LIMITS = 2
MAX_PIXEL_BYTES = 512 * 2**20  # bytes of pixels in all unfinished requests
MAX_FILE_BYTES = 512 * 2**20  # bytes of image files in all unfinished requests
MAX_SCORE_BYTES = 128 * 2**20  # bytes of all prompts' log probabilities
MAX_PROMPT_BYTES = 512 * 2**20  # bytes of a prompt's log probabilities


class UnreadOutput:
    def __init__(self) -> None:
        self.num_bytes = self.num_held_bytes = 0


class RequestLimiter:
    """Refuses requests if the server is overloaded. Use it only on the event loop."""

    def __init__(
        self,
        config: EngineConfig,
        unfinished: Collection[EngineRequest],
        unread: UnreadOutput,
        gauges: Callable[[], Gauges],
    ) -> None:
        self._gauges = gauges
        self._max_unfinished = config.max_running + config.max_waiting
        self._max_tokens = settings.MAX_WAITING_TOKENS
        self.max_unread_bytes = MAX_UNREAD_BYTES
        self._timeout_s = config.queue_timeout
        self._unfinished = unfinished
        self._unread = unread
        self._num_samples = 0
        self._tenant_samples: Counter[str] = Counter()
        self._num_entering_tokens = 0
        self._num_file_bytes = 0
        self.waiting = WaitingPrompts(gauges)
        self._timers: dict[EngineRequest, asyncio.TimerHandle] = {}

    @contextlib.contextmanager
    def entering(self, num_prompt: int, num_samples: int = 1) -> Iterator[None]:
        """Count a request while it is encoded. Raises Overloaded if a limit is exceeded."""
        self.check(num_prompt, num_samples)
        self._num_samples += num_samples
        self._num_entering_tokens += num_prompt
        try:
            yield
        finally:
            self._num_samples -= num_samples
            self._num_entering_tokens -= num_prompt

    @contextlib.contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Count a request's image files until it ends. Raises Overloaded if there are too many bytes."""
        _refuse_above("files", MAX_FILE_BYTES, self._num_file_bytes, num_bytes)
        self._num_file_bytes += num_bytes
        try:
            yield
        finally:
            self._num_file_bytes -= num_bytes

    def check(self, num_prompt: int, num_samples: int) -> None:
        """Raise Overloaded if another request of this size would exceed a limit."""
        _refuse_above("samples", self._max_unfinished, self._num_samples, num_samples)
        if self._unread.num_bytes > self.max_unread_bytes:
            raise Overloaded(
                f"{self._unread.num_bytes} bytes of output are unread by clients, but at most "
                f"{self.max_unread_bytes} are allowed; try again later",
                unread_bytes=self._unread.num_bytes,
                max_unread_bytes=self.max_unread_bytes,
            )
        waiting = self._num_entering_tokens + self.waiting.num_tokens
        _refuse_above("tokens", self._max_tokens, waiting, num_prompt)

    @contextlib.contextmanager
    def sharing(self, tenant: Tenant, num_samples: int) -> Iterator[None]:
        """Count a tenant's request during a ``with`` block. Raises Overloaded if its share is exceeded."""
        count = self._tenant_samples[tenant.name]
        if tenant.share < 1:
            total = self._max_unfinished
            _refuse_above("tenant's samples", tenant.part_of(total), count, num_samples, total)
        self._tenant_samples[tenant.name] += num_samples
        try:
            yield
        finally:
            self._tenant_samples[tenant.name] -= num_samples
            if not self._tenant_samples[tenant.name]:
                del self._tenant_samples[tenant.name]

    def check_share(self, tenant: Tenant, num_prompt: int) -> None:
        """Raise Overloaded if ``num_prompt`` more waiting tokens exceed the tenant's share."""
        if tenant.share >= 1:
            return
        waiting, total = self.waiting.num_tokens_of(tenant.name), self._max_tokens
        _refuse_above("tenant's tokens", tenant.part_of(total), waiting, num_prompt, total)

    def check_memory(self, request: EngineRequest) -> None:
        """Raise Overloaded if images or log probabilities would take too much memory."""
        for bytes_of, most, what in (
            (_pixel_bytes, MAX_PIXEL_BYTES, "images"),
            (_score_bytes, MAX_SCORE_BYTES, "scores"),
        ):
            if size := bytes_of(request):
                _refuse_above(what, most, sum(map(bytes_of, self._unfinished)), size)

    def check_sendable(self, request: EngineRequest) -> None:
        """Raise RequestTooLong if the prompt's log probabilities are too large for a message."""
        size = _score_bytes(request)
        most = min(MAX_UNREAD_LIMITS * self.max_unread_bytes, MAX_PROMPT_BYTES)
        if size > most:
            raise RequestTooLong(
                f"prompt_logprobs={request.params.prompt_logprobs} for {request.num_prompt} tokens must take "
                f"at most {most} bytes, got {size}; request fewer alternatives, or shorten the prompt"
            )

    def watch(
        self,
        request: EngineRequest,
        fail: Callable[[BaseException], None],
        abort: Callable[[EngineRequest], None],
    ) -> None:
        """Count a request until ``forget``. Fail it with QueueTimeout if it waits too long."""
        self._num_samples += request.params.n
        self.waiting.add(request)
        if self._timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._timers[request] = loop.call_later(self._timeout_s, self._expire, request, fail, abort)

    def forget(self, request: EngineRequest) -> None:
        self._num_samples -= request.params.n
        self.waiting.forget(request.number)
        if (timer := self._timers.pop(request, None)) is not None:
            timer.cancel()

    def _expire(
        self,
        request: EngineRequest,
        fail: Callable[[BaseException], None],
        abort: Callable[[EngineRequest], None],
    ) -> None:
        self._timers.pop(request, None)
        if request.number not in self._gauges().begun:
            abort(request)
            fail(
                QueueTimeout(
                    f"the request was not admitted within {self._timeout_s:g} s (queue_timeout); try again "
                    "later, or use another server"
                )
            )


_BYTES = "{what} take {held} bytes, and the {added} bytes of this request would exceed the limit of {most}"
_FULL: Mapping[str, tuple[str, str]] = {
    "files": ("image_bytes", _BYTES.replace("{what}", "image files of unfinished requests")),
    "images": ("image_bytes", _BYTES.replace("{what}", "images of unfinished requests")),
    "scores": (
        "prompt_logprobs_bytes",
        _BYTES.replace("{what}", "log probabilities of prompts of unfinished requests"),
    ),
    "samples": (
        "unfinished_requests",
        "{held} requests are unfinished (each sample counts), but at most {most} are allowed (max_running + "
        "max_waiting)",
    ),
    "tenant's samples": (
        "unfinished_requests",
        "{held} requests of this tenant are unfinished (each sample counts), but at most {most} are allowed, "
        "its share of {total}",
    ),
    "tokens": (
        "waiting_tokens",
        "{held} prompt tokens are waiting, and the {added} of this request would exceed the limit of {most}",
    ),
    "tenant's tokens": (
        "waiting_tokens",
        "{held} prompt tokens of this tenant are waiting, and the {added} of this request would exceed "
        "{most}, the tenant's share of {total}",
    ),
}
"""Resource -> its name in the error's numbers, and the text of the error."""


def _refuse_above(what: str, most: int, held: int, added: int, total: int = 0) -> None:
    """Raise Overloaded if some of a resource is held, and ``added`` more would exceed ``most``."""
    if added and held and held + added > most:
        field, text = _FULL[what]
        numbers = {field: held, f"max_{field}": most}
        text = text.format(held=held, added=added, most=most, total=total)
        raise Overloaded(f"{text}; try again later", **numbers)


def _pixel_bytes(request: EngineRequest) -> int:
    return sum(len(image.pixels) for image in request.images)


def _score_bytes(request: EngineRequest) -> int:
    num_alternatives = request.params.prompt_logprobs
    return 0 if num_alternatives is None else prompt_logprobs_bytes(request.num_prompt, num_alternatives)


def refusal_label(error: Exception) -> str:
    for kind, label in (
        (RequestTooLong, "too_long"),
        (InvalidRequest, "invalid"),
        (QueueTimeout, "queue_timeout"),
        (Overloaded, "overloaded"),
        (EngineStopping, "stopping"),
    ):
        if isinstance(error, kind):
            return label
    return "dead"


class WaitingPrompts:
    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges
        self._begun: frozenset[int] = frozenset()
        self._waiting: dict[int, EngineRequest] = {}
        self._num_tokens: Counter[str] = Counter()

    def add(self, request: EngineRequest) -> None:
        self._waiting[request.number] = request
        self._num_tokens[request.namespace.tenant] += request.num_prompt

    def forget(self, number: int) -> None:
        if (request := self._waiting.pop(number, None)) is not None:
            tenant = request.namespace.tenant
            self._num_tokens[tenant] -= request.num_prompt
            if not self._num_tokens[tenant]:
                del self._num_tokens[tenant]

    @property
    def num_tokens(self) -> int:
        self._update()
        return self._num_tokens.total()

    def num_tokens_of(self, tenant: str) -> int:
        self._update()
        return self._num_tokens[tenant]

    def _update(self) -> None:
        begun = self._gauges().begun
        if begun is not self._begun:
            self._begun = begun
            for number in self._waiting.keys() & begun:
                self.forget(number)
