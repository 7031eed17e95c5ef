"""The engine as its front end sees it, on a thread or in a process of its own."""

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
    """Hears from the engine, on a thread of the engine's: must be quick and must not raise."""

    def ready(self) -> None:
        """The engine can take requests, and the client's properties can be read."""
        ...

    def news(self, news: list[News]) -> None: ...

    def cache_changed(self) -> None:
        """There are new page events, for those who watch."""
        ...

    def ended(self, error: BaseException | None) -> None:
        """The engine is about to end, after ``stop`` (None) or because of an error."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars for requests; see ``GrammarDesk``."""

    def begin(self, structured: StructuredOutput, tenant: str = "") -> Future[int]: ...

    def drop(self, ticket: int | None) -> None: ...

    def prepare(self) -> None: ...

    def close(self) -> None: ...


class EngineClient(Protocol):
    """An engine that tells a ``Listener`` what is new. Calls may come from any thread, and none waits for a
    step.

    capacity      positions that the page pool has for one sequence
    gauges        of the last step
    step_seconds  that the step that is being computed has taken so far
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
        """Begin to load the model."""
        ...

    def add(self, request: EngineRequest) -> None: ...

    def abort(self, number: int) -> None:
        """End the request with this number, if it has not ended: its pages are idle before the next step."""
        ...

    def ask(self, command: Command[AnswerT]) -> Future[AnswerT]:
        """The answer of a command, which is executed between two steps. What that raises becomes the
        future's; EngineStopping when the engine ends first."""
        ...

    def stop(self) -> None:
        """End after the current step, and abort whatever is still running."""
        ...

    def join(self) -> None:
        """Wait until the engine has ended."""
        ...
