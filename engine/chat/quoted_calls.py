"""Tool calls in special notations: Gemma's, which resembles JSON, and notations that are read as a whole."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .call_grammar import ToolFormat
from .call_writer import CallWriter, as_json
from .json_calls import end_mark
from .tag_calls import Parse, parsed_calls
from .text_source import Malformed, Steps, TextSource, Unfinished, Wrap

_WORD = re.compile(r"[^\s{}\[\],:<]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCalls(ToolFormat):
    """``call:NAME{key:<|"|>text<|"|>,number:1}``, with bare keys, and texts between ``quote``."""

    parse: Parse
    quote: str

    def _inner_marks(self) -> tuple[str, ...]:
        return (self.quote,)

    def read(self, source: TextSource, calls: CallWriter) -> Steps[None]:
        while True:
            yield from source.skip_space()
            begun = len(source.taken)
            yield from source.expect("call:")
            name = (yield from source.read_until("{"))[0].strip()
            yield calls.begin(name)
            yield calls.arguments("{")
            yield from self._rest_of_object(source, calls)
            [parsed] = parsed_calls(self.parse, source.taken[begun:], calls.tools)
            if parsed["name"] != name or as_json(parsed["arguments"]) != as_json(calls.loaded()):
                raise Malformed
            yield calls.end()
            yield from source.skip_space()
            if (yield from source.starts_with("call:")) is None:
                break
        yield from end_mark(source, self.end)

    def _rest_of_object(self, source: TextSource, calls: CallWriter) -> Steps[None]:
        """Read an object after its opening brace, as JSON."""
        depth = 1
        while depth:
            if not source.rest:
                yield from source.require_more()
            elif (yield from source.comes(self.quote)):
                yield calls.arguments('"')
                if (yield from source.stream_until(self.quote, wrap=_escaping(calls))) is None:
                    raise Unfinished
                yield calls.arguments('"')
            elif (character := source.rest[0]) in "{}[],:" or character.isspace():
                depth += (character in "{[") - (character in "}]")
                yield calls.arguments(source.take(1))
            else:
                yield calls.arguments((yield from _word(source)))


def _escaping(calls: CallWriter) -> Wrap:
    return lambda text: calls.arguments(as_json(text)[1:-1])


def _word(source: TextSource) -> Steps[str]:
    """Read a key and add the quotes of JSON, or a value unchanged."""
    while (found := _WORD.match(source.rest)) is None or found.end() == len(source.rest):
        if found is None:
            raise Malformed
        yield from source.require_more()
    word = source.take(found.end())
    return as_json(word) if source.rest[0] == ":" else word


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCalls(ToolFormat):
    """Calls that only mlx-lm's parser reads, once they are complete: LFM2, FunctionGemma, Kimi K3."""

    parse: Parse
    inner_marks: tuple[str, ...] = ()

    def _inner_marks(self) -> tuple[str, ...]:
        return self.inner_marks

    def read(self, source: TextSource, calls: CallWriter) -> Steps[None]:
        text, _ = yield from source.read_until(self.end)
        for call in parsed_calls(self.parse, text, calls.tools):
            yield from calls.whole(str(call["name"]), call["arguments"], call.get("id"))
