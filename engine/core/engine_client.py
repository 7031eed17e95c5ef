"""The interface of the engine for its front end; the engine runs on a thread or in another process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from ..api.engine_info import EngineInfo
from ..api.engine_request import EngineRequest, News
from ..api.stats import Gauges
from ..api.structured_output import StructuredOutput
from ..tokenizer.tokenizer import Tokenizer
from .commands import AnswerT, Command


class Listener(Protocol):
    """Receives the engine's messages on an engine thread. Its methods must be quick and must not raise."""

    def ready(self) -> None:
        """Called once when the engine accepts requests. From then on the client's properties can be read."""
        ...

    def news(self, news: list[News]) -> None: ...

    def cache_changed(self) -> None:
        """Called when there are new page events for watchers."""
        ...

    def ended(self, error: BaseException | None) -> None:
        """Called when the engine is about to end: after ``stop`` (None), or because of ``error``."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars for requests; see ``GrammarDesk``."""

    def begin(self, structured: StructuredOutput, tenant: str = "") -> Future[int]: ...

    def drop(self, ticket: int | None) -> None: ...

    def prepare(self) -> None: ...

    def close(self) -> None: ...


class EngineClient(Protocol):
    """An engine that sends news to a ``Listener``. Methods may be called from any thread and do not wait for
    a step.

    capacity      positions that the page pool has for one sequence
    gauges        gauges after the last step
    step_seconds  how long the current step has taken so far
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def capacity(self) -> int: ...

    @property
    def grammars(self) -> GrammarCompiler: ...

    @property
    def gauges(self) -> Gauges: ...

    @property
    def step_seconds(self) -> float: ...

    def start(self) -> None:
        """Start loading the model."""
        ...

    def add(self, request: EngineRequest) -> None: ...

    def abort(self, number: int) -> None:
        """End the request with this number, if it still runs. Its pages are released before the next step."""
        ...

    def ask(self, command: Command[AnswerT]) -> Future[AnswerT]:
        """Queue a command for execution between two steps; return a future of the answer. The future fails
        with the command's error, or with EngineStopping if the engine ends first."""
        ...

    def stop(self) -> None:
        """Let the engine end after the current step and abort all running requests."""
        ...

    def join(self) -> None:
        """Wait until the engine has ended."""
        ...
