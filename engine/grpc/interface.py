"""The interface of an engine to the server: the part of AsyncEngine that clients can reach.

Server, command line and tests use it, so protocol behaviour can be tested with an engine without a model.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..api.config import EngineConfig
from ..api.engine_info import AdapterInfo, EngineInfo
from ..api.outputs import Delta
from ..api.prompt import EncodedPrompt, Prompt
from ..api.sampling_params import SamplingParams
from ..api.stats import Gauges
from ..api.tenant import Tenant
from ..core.commands import AnswerT, Command
from ..frontend.notifier import Notifier

if TYPE_CHECKING:
    from ..tokenizer.tokenizer import Tokenizer


class Caller(Protocol):
    """A client's call over gRPC or HTTP; its metadata are gRPC's metadata or the HTTP headers."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


class Writable(Protocol):
    """Output to the client of one call."""

    def write(self, response: Any, /) -> Awaitable[None]:
        """Write a response; waits while the client does not read."""
        ...


class Engine(Protocol):
    """A started engine; methods are called on its event loop."""

    config: EngineConfig

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def death(self) -> BaseException | None:
        """The error that ended the engine thread; None while the thread runs."""
        ...

    def gauges(self) -> Gauges: ...

    @property
    def num_streams(self) -> int:
        """Number of streams whose output is still being computed or read."""
        ...

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        salt: bytes = b"",
        priority: int = 0,
        final_only: bool = False,
        tenant: Tenant = ...,
        adapter: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Stream the deltas of all samples until each sample has its finish reason. With ``final_only``,
        yield one delta per sample. Closing the generator, or cancelling the task that reads it, frees the
        request's pages within one step."""
        ...

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """The loaded adapters by name."""
        ...

    async def load_adapter(self, name: str, folder: Path, *, replace: bool = False) -> AdapterInfo: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def abort(self, request_id: str) -> None: ...

    async def ask(self, command: Command[AnswerT]) -> AnswerT:
        """Return the answer of a command that the engine executes between two steps."""
        ...

    async def prepare(self, prompt: Prompt) -> EncodedPrompt: ...

    async def encode(self, prompt: Prompt) -> list[int]:
        """Return the prompt's token ids. Raises InvalidRequest if no request could have this prompt."""
        ...

    @property
    def cache_changes(self) -> Notifier:
        """The notifier that announces new page events while there are watchers."""
        ...

    async def stop(self, drain_timeout: float = 0.0) -> None: ...
