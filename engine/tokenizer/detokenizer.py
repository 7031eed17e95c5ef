from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoders return it for invalid UTF-8
CONTEXT_TOKENS = 5
MAX_UNDECIDED_TOKENS = 8
MAX_WINDOW = 32


class Detokenizer:
    """Decodes a stream of token ids into text.

    A character that spans several tokens is returned with its last token. Invalid bytes become U+FFFD.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        context: Sequence[int] = (),
        silent_ids: frozenset[int] = frozenset(),
        shown: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._decode = decode
        self._silent_ids = silent_ids
        self._shown = shown
        self._window = [token for token in context[-CONTEXT_TOKENS:] if token not in silent_ids]
        self._num_settled = len(self._window)
        self._num_given = len(decode(self._window)) if self._window else 0

    def add(self, token_id: int) -> str:
        """Return the new text, which may be empty."""
        if token_id in self._silent_ids:
            return self._rest() + self._shown[token_id] if token_id in self._shown else ""
        window = self._window
        window.append(token_id)
        text = self._decode(window)
        if not text.endswith(REPLACEMENT):
            stable = len(text)
        elif len(window) - self._num_settled > MAX_UNDECIDED_TOKENS:
            stable = len(text) - 1
        else:
            stable = len(text.rstrip(REPLACEMENT))
        if stable <= self._num_given and len(window) < MAX_WINDOW:
            return ""
        new = text[self._num_given : stable]
        # Decoders may treat a first token differently, so keep some context.
        del window[: self._num_settled]
        self._num_settled = len(window)
        self._num_given = len(self._decode(window)) - (len(text) - stable)
        return new

    def _rest(self) -> str:
        text = self._decode(self._window) if self._window else ""
        rest = text[self._num_given :]
        self._num_settled, self._num_given = len(self._window), len(text)
        return rest


class StopChecker:
    """Finds stop strings in a stream of text. ``match`` is the stop string that was found."""

    def __init__(
        self,
        stops: Sequence[str],
        *,
        forms: Mapping[str, str] | None = None,
        markers: Mapping[int, str] | None = None,
        shows_match: bool = False,
    ) -> None:
        self._asked: dict[str, str] = {stop: stop for stop in stops} | dict(forms or {})
        self._shows_match = shows_match
        self._markers = dict(markers or {})
        self._unshown = dict.fromkeys(map(ord, self._markers.values()))
        self._stops = tuple(self._asked)
        self._longest = max(map(len, self._stops), default=0)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.match: str | None = None

    def marker(self, token_id: int) -> str:
        return self._markers.get(token_id, "")

    def add(self, text: str) -> str:
        """Add text and return the text that is certain to contain no stop string."""
        if self.match is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if found:
            end, _, form = min(found)
            self.match, self._held = self._asked[form], ""
            shown = text[: end - len(form)].translate(self._unshown)
            return shown + self.match if self._shows_match else shown
        start = self._undecided_from(text)
        self._held = text[start:]
        return text[:start].translate(self._unshown)

    def flush(self) -> str:
        """Return the remaining text at the end of the stream."""
        held, self._held = self._held, ""
        return held.translate(self._unshown)

    def _undecided_from(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
