"""Progress of the prompts of unfinished requests, as a gauge."""

from __future__ import annotations

from collections.abc import Mapping

from .request import Request


class PromptProgress:
    """Remaining prompt tokens of every admitted request. An ended request is left out from the second
    measurement on, when its last news was delivered."""

    def __init__(self) -> None:
        self._begun: dict[Request, None] = {}
        self._in_prompt: dict[Request, None] = {}  # requests without a first token
        self._ended: list[Request] = []
        self._changed = False
        self._left: Mapping[int, int | None] = {}

    def begin(self, request: Request) -> None:
        """Note that a request's prompt is about to be computed for the first time."""
        self._begun[request] = self._in_prompt[request] = None

    def end(self, request: Request) -> None:
        if request in self._begun:
            self._ended.append(request)

    def measure(self) -> Mapping[int, int | None]:
        """Return ``Gauges.prompts_left``; the same mapping as before if nothing has changed."""
        if self._in_prompt or self._ended or self._changed:
            self._left = {request.number: self._left_of(request) for request in self._begun}
            self._changed = bool(self._ended)
            for request in self._ended:
                self._begun.pop(request, None)
                self._in_prompt.pop(request, None)
            self._ended.clear()
        return self._left

    def _left_of(self, request: Request) -> int | None:
        if request not in self._in_prompt:
            return 0
        if request.first_token_at is not None:
            del self._in_prompt[request]
            return 0
        table = request.samples[0].sequence.table
        return None if table is None else max(0, request.num_prompt - table.num_written)
