from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from ..api.embedding import check_dimensions, finished
from ..api.engine_info import AdapterInfo
from ..api.errors import (
    EngineStopping,
    Forbidden,
    InvalidRequest,
    NotConfigured,
    RequestFailed,
    SlowReader,
)
from ..api.outputs import Delta, FinishReason
from ..api.prompt import Prompt
from ..api.sampling_params import Pooling, SamplingParams
from ..api.tenant import NO_TENANT, TENANT_SHARE, Tenant
from ..frontend.text_executor import TextExecutor
from .page_events import PageEventHub
from .security import Caller, Security

if TYPE_CHECKING:
    from ..frontend.async_engine import AsyncEngine

MessageT = TypeVar("MessageT")
ResultT = TypeVar("ResultT")
Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

MAX_TEXT_CALLS = 256  # Tokenize and Detokenize calls that run or wait
MAX_REQUEST_ID = 256  # characters
LONG_SCORES = 32  # converting more log probabilities takes over a millisecond
MAX_SALT = 1024  # characters
MAX_ABORTED = 4096  # request ids in one call
PRIORITY_KEY = "octavo-priority"
SALT_KEY = "octavo-cache-salt"
ADAPTER_KEY = "octavo-adapter"
OPERATOR = "operator"  # tenant that may change the shared cache
WRITE_TIMEOUT_S = 30.0


class RequestHandler:
    """Serves requests until ``draining`` is set. Each tenant has its own request ids and cached pages."""

    def __init__(
        self,
        engine: AsyncEngine,
        security: Security,
        begin: Callable[[str, Metadata], None] | None = None,
        *,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        self._begin = begin
        self.draining = False
        self.engine = engine
        self.security = security
        self.texts = TextExecutor("convert", max_pending=MAX_TEXT_CALLS)
        self._messages = TextExecutor("answer")
        self.writer = ResponseWriter(write_timeout_s)
        self.page_events = PageEventHub(engine)
        self.ready_since = time.monotonic()
        self.last_request_at = 0.0  # seconds since the epoch; 0 before the first request
        self.generated = Rate()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._active: dict[tuple[str, str], str] = {}

    @property
    def num_active(self) -> int:
        return len(self._active)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        context: Caller,
        request_id: str,
        cache_salt: str = "",
        priority: int = 0,
        final_only: bool = False,
        adapter: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Stream the deltas of one request. Closing the stream aborts the request."""
        self.last_request_at = time.time()
        if self.draining:
            raise EngineStopping("the server is draining and takes no new requests; use another server")
        request_id = checked_id(request_id) or uuid.uuid4().hex
        tenant = self.security.tenant_of(context)
        name = (tenant, request_id)
        if name in self._active:
            raise InvalidRequest(
                f"request_id {request_id!r} belongs to a running request; choose another id, or leave it out"
            )
        engine_id = own_name(tenant, request_id)
        salt = self.salt_of(context, cache_salt)
        deltas = self.engine.generate(
            prompt,
            params,
            request_id=engine_id,
            salt=salt,
            priority=priority_of(context, priority),
            final_only=final_only,
            tenant=self.tenant(context),
            adapter=self.adapter_of(context, adapter),
        )
        self._active[name] = engine_id
        if self._begin is not None:
            self._begin(engine_id, context.invocation_metadata() or ())
        begun = False
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    if not begun:
                        begun = True
                        self.num_prompt_tokens += delta.prompt_tokens
                        self.num_cached_tokens += delta.cached_tokens
                    self.generated.add(len(delta.token_ids))
                    yield replace(delta, request_id=request_id) if tenant else delta
        finally:
            del self._active[name]

    async def whole(self, prompt: Prompt, params: SamplingParams, **asked: Any) -> Delta:
        """Return the output of a request with one sample; ``asked`` are arguments of ``generate``. Raises
        RequestFailed or EngineStopping."""
        async with aclosing(self.generate(prompt, params, final_only=True, **asked)) as deltas:
            async for delta in deltas:
                if delta.finish_reason is FinishReason.ERROR:
                    raise RequestFailed(delta.error or "computing this request failed")
                if delta.finish_reason is not FinishReason.ABORT:
                    return delta
        raise EngineStopping("the request was ended before its output was complete; send it again")

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: Pooling = "last",
        dimensions: int | None = None,
        normalize: bool = True,
        **asked: Any,
    ) -> tuple[list[float], Delta]:
        """Return the embedding of a prompt, and the output that has its token counts."""
        check_dimensions(dimensions)
        params = SamplingParams(max_tokens=1, ignore_eos=True, pooling=pooling)
        delta = await self.whole(prompt, params, **asked)
        if delta.embedding is None:
            raise RequestFailed("the request ended without an embedding; send the request again")
        return finished(delta.embedding, dimensions=dimensions, normalize=normalize), delta

    async def message_of(self, delta: Delta, make: Callable[[], MessageT]) -> MessageT:
        size = len(delta.logprobs) + (0 if delta.prompt_logprobs is None else len(delta.prompt_logprobs.rest))
        return await self._messages.run(NO_TENANT, make) if size > LONG_SCORES else make()

    def close(self) -> None:
        self.texts.close()
        self._messages.close()

    def tenant_of(self, context: Caller) -> str:
        """Return the tenant of a call; "" on a server without tokens."""
        return self.security.tenant_of(context)

    def tenant(self, context: Caller) -> Tenant:
        name, tokens = self.tenant_of(context), self.security.tokens
        is_shared = tokens is not None and tokens.num_tenants > 1
        return Tenant(name, TENANT_SHARE if is_shared else 1.0)

    def tenant_salt(self, context: Caller) -> bytes:
        return self.security.salts.of(self.tenant_of(context))

    def salt_of(self, context: Caller, cache_salt: str) -> bytes:
        """Return the salt of a request's pages. Raises InvalidRequest if message and metadata differ."""
        salts = {salt for salt in (cache_salt, *_metadata(context, SALT_KEY)) if salt}
        if (longest := max(map(len, salts), default=0)) > MAX_SALT:
            raise InvalidRequest(
                f"cache_salt must have at most {MAX_SALT} characters, got {longest}; use a hash of it"
            )
        if len(salts) > 1:
            raise InvalidRequest(
                f"the request has {len(salts)} different cache salts, in cache_salt and in the metadata "
                f"{SALT_KEY}; give one salt"
            )
        return self.tenant_salt(context) + "".join(salts).encode()

    def check_operator(self, context: Caller, action: str) -> None:
        """Raise Forbidden unless the caller is an operator."""
        tenant = self.tenant_of(context)
        if tenant not in ("", OPERATOR):
            raise Forbidden(
                f"only the tenant {OPERATOR!r} may {action}, but this token has another tenant; use a token "
                f"that --auth-token-file assigns to {OPERATOR!r}"
            )

    def adapter_of(self, context: Caller, adapter: str | None) -> str | None:
        """Return the adapter of a request. Raises InvalidRequest if message and metadata differ, and
        Forbidden for an adapter of another tenant."""
        names = {name for name in (adapter, *_metadata(context, ADAPTER_KEY)) if name}
        if len(names) > 1:
            raise InvalidRequest(
                f"the request must name one adapter, got {len(names)} (in the message and in the metadata "
                f"{ADAPTER_KEY}); give one"
            )
        name = next(iter(names), None)
        if name is not None and not self._may_use(context, name):
            raise Forbidden(
                f"adapter must be open to this tenant, got {name!r:.100}; ask the operator to add the tenant "
                "to --lora-tenants"
            )
        return name

    def _may_use(self, context: Caller, adapter: str) -> bool:
        tenant, tenants = self.tenant_of(context), self.engine.config.lora_tenants_by_name.get(adapter)
        return tenants is None or tenant in ("", OPERATOR) or tenant in tenants

    def adapters(self, context: Caller) -> Mapping[str, AdapterInfo]:
        loaded = self.engine.adapters
        return {name: info for name, info in loaded.items() if self._may_use(context, name)}

    async def load_adapter(
        self, name: str, path: str, *, context: Caller, replace: bool = False
    ) -> AdapterInfo:
        """Load a LoRA adapter from a folder below ``lora_dir``. Raises Forbidden, NotConfigured or
        InvalidRequest."""
        self.check_operator(context, "load adapters")
        if (below := self.engine.config.lora_dir) is None:
            raise NotConfigured("loading adapters needs a folder; start the server with --lora-dir DIR")
        try:
            folder = (below / path).resolve()
            folder.relative_to(below.resolve())
        except (OSError, RuntimeError, ValueError):
            raise InvalidRequest(
                f"lora_path must be below {below}, got {path!r:.200}; move the adapter there"
            ) from None
        if not name or len(name) > MAX_REQUEST_ID or not name.isprintable():
            raise InvalidRequest(
                f"an adapter's name must have 1 to {MAX_REQUEST_ID} characters that can be printed, "
                f"got {name!r:.300}; choose another name"
            )
        return await self.engine.load_adapter(name, folder, replace=replace)

    async def unload_adapter(self, name: str, *, context: Caller) -> None:
        """Unload a LoRA adapter. Raises Forbidden, NotFound, or InvalidRequest while it is in use."""
        self.check_operator(context, "unload adapters")
        await self.engine.unload_adapter(name)

    async def abort(self, request_ids: Sequence[str], *, context: Caller) -> list[str]:
        """Abort requests of the caller's tenant; return the ids of running requests."""
        if len(request_ids) > MAX_ABORTED:
            raise InvalidRequest(
                f"at most {MAX_ABORTED} requests can be aborted in one call, got {len(request_ids)}; send "
                "several calls"
            )
        tenant = self.security.tenant_of(context)
        found = [request_id for request_id in request_ids if (tenant, request_id) in self._active]
        for request_id in found:
            if (engine_id := self._active.get((tenant, request_id))) is not None:
                await self.engine.abort(engine_id)
        return found


async def in_parallel(work: Callable[[int], Awaitable[ResultT]], count: int, most: int) -> list[ResultT]:
    """Return the results for 0 to ``count - 1``, of which ``most`` are computed at a time. Raises the first
    error."""
    left, found = iter(range(count)), dict[int, ResultT]()

    async def work_on() -> None:
        for index in left:
            found[index] = await work(index)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(count, most)):
                group.create_task(work_on())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [found[index] for index in range(count)]


def own_name(tenant: str, name: str) -> str:
    return f"{tenant}/{name}" if tenant else name


def _metadata(context: Caller, key: str) -> list[str]:
    return [str(value) for name, value in context.invocation_metadata() or () if name == key]


def priority_of(context: Caller, priority: int) -> int:
    """Return the priority from the message or the metadata. Raises InvalidRequest for a malformed value."""
    given = _metadata(context, PRIORITY_KEY)
    if priority or not given:
        return priority
    try:
        return int(given[-1])
    except ValueError as error:
        raise InvalidRequest(
            f"the metadata {PRIORITY_KEY} must be a whole number, got {given[-1]!r}; 0 is the default"
        ) from error


def checked_id(request_id: str) -> str:
    """Return a request id. Raises InvalidRequest if it is too long or not printable."""
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidRequest(
            f"request_id has {len(request_id)} characters, at most {MAX_REQUEST_ID} are allowed; shorten it, "
            "or leave it out for a generated id"
        )
    if not request_id.isprintable():
        raise InvalidRequest(
            f"request_id {request_id!r} has characters that cannot be printed; remove them, or leave "
            "request_id out for a generated id"
        )
    return request_id


@dataclass(slots=True, eq=False)
class _Write:
    task: asyncio.Task[Any]
    since: float
    expired: bool = False


class Writable(Protocol):
    def write(self, response: Any, /) -> Awaitable[None]: ...


class ResponseWriter:
    def __init__(self, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._writes: dict[_Write, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, context: Writable, response: Any) -> None:
        """Write a response. Raises SlowReader on a timeout."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        write = _Write(task, loop.time())
        self._writes[write] = None
        if self._timer is None:
            self._timer = loop.call_later(self.timeout_s, self._check)
        try:
            await context.write(response)
        except asyncio.CancelledError:
            if write.expired and not task.uncancel():
                raise SlowReader(
                    f"the client has not read its output for {self.timeout_s:g} s; read faster, request "
                    "less output, or start the server with a longer --write-timeout"
                ) from None
            raise
        finally:
            self._writes.pop(write, None)

    def _check(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        now = loop.time()
        while self._writes:
            write = next(iter(self._writes))
            left = write.since + self.timeout_s - now
            if left > 0:
                self._timer = loop.call_later(left, self._check)
                return
            del self._writes[write]
            write.expired = True
            write.task.cancel()


class Rate:
    """Events per second over the last ``window_s`` seconds."""

    def __init__(self, window_s: float = 10.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._began = clock()
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, num_events: int) -> None:
        now = self._clock()
        if self._counts and now - self._counts[-1][0] < 0.1:
            began, count = self._counts[-1]
            self._counts[-1] = (began, count + num_events)
        else:
            self._counts.append((now, num_events))
            self._forget(now)

    def per_second(self) -> float:
        now = self._clock()
        self._forget(now)
        span = min(self._window_s, now - self._began)
        return sum(count for _, count in self._counts) / span if span > 0 else 0.0

    def _forget(self, now: float) -> None:
        while self._counts and self._counts[0][0] <= now - self._window_s:
            self._counts.popleft()
