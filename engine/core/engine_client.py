"""Interface of the engine for its front end."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from ..api.engine_info import EngineInfo
from ..api.engine_request import EngineOutput, EngineRequest
from ..api.stats import Gauges
from ..api.structured_output import StructuredOutput
from ..tokenizer.tokenizer import Tokenizer
from .commands import AnswerT, Command


class Listener(Protocol):
    """Receives the engine's messages on an engine thread. Its methods must be quick and must not raise."""

    def ready(self) -> None:
        """Called once, when the engine accepts requests."""
        ...

    def outputs(self, outputs: list[EngineOutput]) -> None: ...

    def cache_changed(self) -> None:
        """Called when there are new page events."""
        ...

    def ended(self, error: BaseException | None) -> None:
        """Called once, when the engine ends. ``error`` is None after ``stop``."""
        ...


class GrammarCompiler(Protocol):
    def begin(self, structured: StructuredOutput, tenant: str = "") -> Future[int]: ...

    def drop(self, ticket: int | None) -> None: ...

    def prepare(self) -> None: ...

    def close(self) -> None: ...


class EngineClient(Protocol):
    """Engine that sends messages to a ``Listener``. All methods are thread-safe and return at once.

    ``info``, ``tokenizer``, ``capacity`` and ``grammars`` exist once the engine is ready.

    capacity      positions that the page pool has for one sequence
    step_seconds  seconds that the current step has taken
    """

    info: EngineInfo
    tokenizer: Tokenizer
    capacity: int
    grammars: GrammarCompiler

    @property
    def gauges(self) -> Gauges: ...

    @property
    def step_seconds(self) -> float: ...

    def start(self) -> None: ...

    def add(self, request: EngineRequest) -> None: ...

    def abort(self, number: int) -> None:
        """End the request with this number. Its pages are released before the next step."""
        ...

    def run_command(self, command: Command[AnswerT]) -> Future[AnswerT]:
        """Queue a command. The future fails with the command's error, or with EngineStopping."""
        ...

    def stop(self) -> None:
        """Abort all running requests and end the engine after the current step."""
        ...

    def join(self) -> None: ...
