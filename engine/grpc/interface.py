"""Engine interface for the servers. Tests implement it without a model."""

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
    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


class Writable(Protocol):
    def write(self, response: Any, /) -> Awaitable[None]: ...


class Engine(Protocol):
    """Methods of an engine. Call them on the engine's event loop."""

    config: EngineConfig

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def dead_error(self) -> BaseException | None:
        """The error that ended the engine thread; None while the thread runs."""
        ...

    def gauges(self) -> Gauges: ...

    @property
    def num_streams(self) -> int: ...

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
        """Stream the deltas of all samples. Closing the generator aborts the request."""
        ...

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]: ...

    async def load_adapter(self, name: str, folder: Path, *, replace: bool = False) -> AdapterInfo: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def abort(self, request_id: str) -> None: ...

    async def run_command(self, command: Command[AnswerT]) -> AnswerT:
        """Execute a command on the engine's thread and return its answer."""
        ...

    async def prepare(self, prompt: Prompt) -> EncodedPrompt: ...

    async def encode(self, prompt: Prompt) -> list[int]:
        """Return the prompt's token ids. Raises InvalidRequest for an invalid prompt."""
        ...

    @property
    def cache_changes(self) -> Notifier: ...

    async def stop(self, drain_timeout: float = 0.0) -> None: ...
