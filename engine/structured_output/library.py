from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .limits import (
    MAX_GRAMMAR_SIZE,
    MAX_ITEMS_IN_ROW,
    MAX_LEXER_STATES,
    STEP_LEXER_FUEL,
    STEP_MAX_ITEMS,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


def make_tokenizer(serialized: str, *, num_tokens: int, end_ids: Sequence[int]) -> LLTokenizer:
    """Build llguidance's tokenizer from a ``tokenizer.json``. Raises ValueError or a panic of the library."""
    from llguidance import LLTokenizer

    return LLTokenizer(serialized, n_vocab=num_tokens, eos_token=list(end_ids))


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def first_line(message: str) -> str:
    lines = [line.strip() for line in message.partition("<state>")[0].splitlines()]
    return " ".join(line for line in lines if line)[:300]
