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
    """A call of either protocol, with gRPC's metadata or HTTP's headers."""

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
        """Reason for which the engine thread has ended; None while it lives."""
        ...

    def gauges(self) -> Gauges: ...

    @property
    def num_streams(self) -> int:
        """Number of outputs that are being computed or read."""
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
        """Stream the deltas of all samples until each has its finish reason (``final_only``: one delta per
        sample). Closing the generator, or cancelling the task that reads it, frees the request's pages within
        one step."""
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
        """Return the prompt's token ids. Raises InvalidRequest for a prompt that no request could have."""
        ...

    @property
    def cache_changes(self) -> Notifier:
        """Notifier of page events, while there are watchers."""
        ...

    async def stop(self, drain_timeout: float = 0.0) -> None: ...
