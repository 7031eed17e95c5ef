"""From a schema or grammar to a constraint on tokens, by the library llguidance.

llguidance follows an Earley parser over a lexer of regular-expression derivatives, so nothing
is precomputed per vocabulary: compiling takes about a millisecond and a mask tens of
microseconds, also for 150,000 tokens.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from ..api.errors import InvalidRequest
from ..api.structured_output import Structured
from .constraint import Constraint, ConstraintFailed, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from ..tokenizer.tokenizer import Tokenizer

MAX_CACHED = 64  # compiled grammars that are kept
MAX_CACHED_CHARACTERS = 2**20  # of their sources, together
# Between the elements of JSON: models that may write any white space tend to write nothing else.
WHITESPACE = r"[ \n]?"
MAX_DEPTH = 64  # nesting of a schema: its compiler recurses


class ConstraintCompiler:
    """Compiles for one model's tokenizer. Safe to use from several threads.

    The library's view of the tokenizer is made with the first constraint, and the latest
    constraints are kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = np.array(sorted(id for id in tokenizer.eos_ids if id < vocab_size), np.intp)
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[tuple[str, str], Constraint] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, structured: Structured) -> Constraint:
        """A constraint at its beginning. Raises InvalidRequest naming the field and what is wrong
        with it. Takes milliseconds, and up to a second for extreme grammars and for the first one."""
        key = (structured.kind, structured.source)
        with self._lock:
            if (found := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return found.copy()
            tokenizer = self._made_tokenizer()
        made = self._compile(tokenizer, structured)
        with self._lock:
            self._cache[key] = made
            while len(self._cache) > MAX_CACHED or self._num_characters() > MAX_CACHED_CHARACTERS:
                self._cache.popitem(last=False)
        return made.copy()

    def _num_characters(self) -> int:
        return sum(len(source) for _, source in self._cache)

    def _made_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            if not len(self._end_ids):
                raise InvalidRequest(
                    "structured output needs a model with an end token, and this one has none; leave it out"
                )
            size = max(self._vocab_size, self._source.vocab_size)
            ends = self._end_ids.tolist()
            try:
                self._tokenizer = LLTokenizer(self._source.serialized(), n_vocab=size, eos_token=ends)
            except Exception as error:  # the library raises plain ValueError and its own panics
                raise InvalidRequest(
                    "structured output is not possible with this model's tokenizer: "
                    f"{first_line(str(error))}; leave it out"
                ) from error
        return self._tokenizer

    def _compile(self, tokenizer: LLTokenizer, structured: Structured) -> Constraint:
        from llguidance import LLMatcher

        kind = structured.kind
        try:
            grammar = _grammar_of(structured)
        except (ValueError, RecursionError, KeyError, TypeError, AssertionError) as error:
            raise _refusal(kind, str(error)) from error
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise _refusal(kind, matcher.get_error())
        made = Constraint(matcher, kind, vocab_size=self._vocab_size, end_ids=self._end_ids)
        try:
            beginnings = np.flatnonzero(made.allowed(may_end=False))
        except ConstraintFailed as error:
            raise _refusal(kind, str(error)) from error
        if np.isin(beginnings, self._end_ids).all():
            raise _refusal(kind, "it allows nothing but the empty output")
        return made


def _refusal(kind: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{kind} cannot be used: {first_line(reason)}; correct it or leave it out")


def _limits() -> LLParserLimits:
    """A grammar must not hold up the engine: a step of the lexer stays below some ten milliseconds."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _grammar_of(structured: Structured) -> str:
    """The library's own form of a constraint. ValueError for what is not well formed."""
    from llguidance import LLMatcher, grammar_from

    match structured.kind:
        case "json_schema":
            return _json_grammar(LLMatcher, _parsed(structured.source))
        case "json_object":
            return _json_grammar(LLMatcher, {"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(structured.source)
        case "grammar":
            return grammar_from("grammar", structured.source)
        case "choice":
            alternatives = " | ".join(json.dumps(choice) for choice in structured.choice)
            return LLMatcher.grammar_from_lark(f"start: {alternatives}")
        case _:
            return _tag_grammar(_parsed(structured.source))


def _json_grammar(library: type[LLMatcher], schema: Any) -> str:
    if schema is False:
        raise ValueError("it allows nothing")
    schema = {} if schema is True else schema
    return library.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": WHITESPACE})


def _parsed(source: str) -> Any:
    try:
        value = json.loads(source)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    return value


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = inner
    return depth


def _tag_grammar(value: Any) -> str:
    """Of {"triggers": [...], "structures": [{"begin", "schema", "end"}]}, vLLM's first form of tags."""
    from llguidance import StructTag

    if not isinstance(value, dict) or not isinstance(value.get("structures"), list):
        raise ValueError('it must be an object with "triggers" and "structures"')
    if unknown := value.keys() - {"type", "triggers", "structures"}:
        raise ValueError(f"its key {sorted(unknown)[0]!r} is not known")
    tags = []
    for structure in value["structures"]:
        begin, triggers = structure["begin"], value["triggers"]
        trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"{begin!r} begins with none of the triggers {triggers!r}")
        schema = structure["schema"]
        if not isinstance(schema, dict):
            raise ValueError(f"the schema of {begin!r} must be an object")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"]))
    if not tags:
        raise ValueError("it has no structures")
    return StructTag.to_grammar(tags, assume_special=False)
