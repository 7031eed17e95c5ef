from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .kinds import KINDS, Card, KeysExhausted, Kind, Turn
from .words import (
    ANSWER_WEIGHT,
    CONTEXT_WEIGHT,
    START,
    STOP,
    Segment,
    estimated_tokens,
    joined,
)

TURN_TOKENS = 9  # special tokens, roles and line ends of one turn


@dataclass(frozen=True, slots=True)
class Ledger:
    """A ledger and questions about it with their correct answers, in order.

    kind     "Codes", "Sales", "Residents" or "Stock"
    body     the ledger: a title and one line per record
    prefix   the chat up to the first question
    """

    kind: str
    body: str
    prefix: str
    turns: tuple[Turn, ...]

    def segments(self) -> list[Segment]:
        """Return the whole chat as training text: contexts alternating with answers."""
        segments: list[Segment] = []
        for turn in self.turns:
            opening = f"\n{START}user\n" if segments else self.prefix
            segments.append((f"{opening}{turn.question}{STOP}\n{START}assistant\n", CONTEXT_WEIGHT))
            segments.append((f"{turn.answer}{STOP}", ANSWER_WEIGHT))
        return segments

    def prompts(self) -> list[str]:
        """Return, for each turn, the chat up to the turn's answer; earlier answers are the correct ones."""
        segments = self.segments()
        return [joined(segments[: 2 * index + 1]) for index in range(len(self.turns))]


def make_ledger(
    rng: Random,
    length: int,
    *,
    share: float = 0.6,
    absent_rate: float = 0.12,
    kind: type[Kind] | None = None,
) -> Ledger:
    """Return a ledger of about ``share * length`` tokens, and questions up to a total of ``length`` tokens.

    absent_rate   share of questions about a key that does not exist
    """
    source = (kind or rng.choice(KINDS))(rng)
    cards: list[Card] = []
    size = 10
    while size < share * length or len(cards) < 2:
        try:
            card = source.card(source.fresh())
        except KeysExhausted:
            break
        cards.append(card)
        size += estimated_tokens(card.line) + 1
    body = f"{source.title}:\n" + "\n".join(card.line for card in cards)
    prefix = _prefix(body, rng.random())
    turns: list[Turn] = []
    while True:
        turn = _turn(rng, source, cards, absent_rate)
        cost = estimated_tokens(turn.question) + estimated_tokens(turn.answer) + TURN_TOKENS
        if turns and size + cost > length:
            return Ledger(type(source).__name__, body, prefix, tuple(turns))
        size += cost
        turns.append(turn)


def _prefix(body: str, placement: float) -> str:
    if placement < 0.3:
        return f"{START}system\n{body}{STOP}\n{START}user\n"
    if placement < 0.45:
        return f"{body}\n{START}user\n"
    return f"{START}user\n{body}\n\n"


def _turn(rng: Random, source: Kind, cards: list[Card], absent_rate: float) -> Turn:
    if rng.random() < absent_rate:
        key = source.fresh()
        return Turn(rng.choice(source.card(key).turns).question, source.absent(key))
    return rng.choice(rng.choice(cards).turns)


def held_out(length: int, count: int, *, seed: int = 1) -> list[Ledger]:
    """Return ledgers that training did not use; each has ``length`` tokens, questions included."""
    return [
        make_ledger(
            Random(f"held-out:{seed}:{length}:{index}"), length, share=0.7, kind=KINDS[index % len(KINDS)]
        )
        for index in range(count)
    ]
