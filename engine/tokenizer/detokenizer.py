"""Text from tokens, one token at a time: never half a character, never part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoders return it for bytes that are not UTF-8 (yet)
CONTEXT_TOKENS = 5  # prompt tokens that decide whether the first word starts with a space
MAX_UNDECIDED_TOKENS = 8  # a character has at most 4 bytes, so more than this is not text
MAX_WINDOW = 32  # tokens decoded at once, if many in a row have no text


class Detokenizer:
    """Decodes a stream of token ids into pieces of text, which together are the whole text.

    Only a short window of tokens is decoded each time, so a token's cost does not depend on earlier ones. A
    character whose bytes are spread over several tokens is returned with its last byte. Bytes that never
    become a character are returned as U+FFFD, or dropped at the end.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        context: Sequence[int] = (),
        silent_ids: frozenset[int] = frozenset(),
        shown: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """``decode`` returns the text of ids. ``context``: tokens before the first one. ``silent_ids``
        (special tokens) have no text, except those in ``shown``."""
        self._decode = decode
        self._silent_ids = silent_ids
        self._shown = shown
        self._window = [token for token in context[-CONTEXT_TOKENS:] if token not in silent_ids]
        self._num_settled = len(self._window)  # tokens of the window whose text was returned
        self._num_given = len(decode(self._window)) if self._window else 0  # characters of that text

    def add(self, token_id: int) -> str:
        """Return the text that became certain with this token; often one word, sometimes empty."""
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
        # The newest settled tokens stay as context: a decoder may treat a first token differently.
        del window[: self._num_settled]
        self._num_settled = len(window)
        self._num_given = len(self._decode(window)) - (len(text) - stable)
        return new

    def _rest(self) -> str:
        """Return all held text, because a special token follows."""
        text = self._decode(self._window) if self._window else ""
        rest = text[self._num_given :]
        self._num_settled, self._num_given = len(self._window), len(text)
        return rest


class StopChecker:
    """Finds stop strings in a stream of text. The pieces in which text arrives do not change the result.

    Text that may be the beginning of a stop string is held back. The match that ends first wins; of two that
    end together, the longer one does. ``match`` is the stop string found, if any.

    Tokens without text may be part of a stop string: ``markers`` maps each of these to a character, and
    ``forms`` maps stop strings written with these characters to the original ones. A marker is passed to
    ``add`` and never shown.
    """

    def __init__(
        self,
        stops: Sequence[str],
        *,
        forms: Mapping[str, str] | None = None,
        markers: Mapping[int, str] | None = None,
        shows_match: bool = False,
    ) -> None:
        """``shows_match``: whether the match is part of the text."""
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
        """Return the character that stands for a token in ``add``; empty if no stop string has the token."""
        return self._markers.get(token_id, "")

    def add(self, text: str) -> str:
        """Return the text that may be shown now. A match ends the text: later calls return nothing."""
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
        """Return the text held back, because no more text comes."""
        held, self._held = self._held, ""
        return held.translate(self._unshown)

    def _undecided_from(self, text: str) -> int:
        """Return the start of the longest suffix of ``text`` that may begin a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_characters:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
