"""The four kinds of ledger: their keys, lines and answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

from .words import (
    ADJECTIVE,
    CITY,
    FIRST,
    ITEM,
    JOB,
    LAST,
    PET,
    PLACE,
    coined,
    number,
    quantity,
)


@dataclass(frozen=True, slots=True)
class Turn:
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Card:
    """A line of a ledger, with the questions that it answers."""

    line: str
    turns: tuple[Turn, ...]


class KeysExhausted(ValueError):
    """The ledger already has as many lines as its kind allows."""


class Kind(ABC):
    title: str

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.used: set[str] = set()

    @abstractmethod
    def key(self) -> str:
        """Draw a random key, which may be in use."""

    @abstractmethod
    def card(self, key: str) -> Card: ...

    def absent(self, key: str) -> str:
        """Return the answer for a key that the ledger lacks."""
        return f"{key} is not in the ledger."

    def fresh(self) -> str:
        """Draw a key that is not in use; KeysExhausted after 200 attempts."""
        for _ in range(200):
            key = self.key()
            if key not in self.used:
                self.used.add(key)
                return key
        raise KeysExhausted(f"{self.title}: no unused key left after {len(self.used)}")


class Codes(Kind):
    title = "Door codes"

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.digits = rng.choice((4, 4, 4, 3, 5, 6))
        self.style = rng.randrange(4)

    def key(self) -> str:
        return f"{self.rng.choice(ADJECTIVE)} {self.rng.choice(PLACE)}"

    def card(self, key: str) -> Card:
        code = number(self.rng, self.digits)
        full = f"The code of the {key} is {code}."
        line = (
            full,
            f"The {key} opens with code {code}.",
            f"The {key}: {code}.",
            f"For the {key} the code is {code}.",
        )[self.style]
        turns = (
            Turn(f"What is the code of the {key}?", full),
            Turn(f"Which code opens the {key}?", full),
            Turn(f"Give only the code of the {key}.", f"Code {code}."),
        )
        return Card(line, turns)

    def absent(self, key: str) -> str:
        return f"The {key} is not in the ledger."


class People(Kind):
    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.full_names = rng.random() < 0.6
        self.style = rng.randrange(3)

    def key(self) -> str:
        rng = self.rng
        crowded = not self.full_names and len(self.used) > len(FIRST) // 2
        first = coined(rng) if crowded or rng.random() < 0.15 else rng.choice(FIRST)
        if not self.full_names:
            return first
        return f"{first} {coined(rng) if rng.random() < 0.1 else rng.choice(LAST)}"


class Sales(People):
    title = "Sales"

    def card(self, key: str) -> Card:
        rng = self.rng
        count, item = str(rng.randrange(2, 100)), rng.choice(ITEM) + "s"
        buyer = coined(rng) if rng.random() < 0.1 else rng.choice(FIRST)
        city, price, day = rng.choice(CITY), quantity(rng), str(rng.randrange(1, 100))
        line = (
            f"{key} sold {count} {item} to {buyer} in {city} on day {day} for {price} coins.",
            f"On day {day} {key} sold {count} {item} to {buyer} in {city} for {price} coins.",
            f"{key} sold {count} {item} in {city} to {buyer} for {price} coins on day {day}.",
        )[self.style]
        turns = [
            Turn(f"What did {key} sell?", f"{key} sold {count} {item}."),
            Turn(f"Who bought from {key}?", f"{key} sold to {buyer}."),
            Turn(f"Where did {key} sell?", f"{key} sold in {city}."),
            Turn(f"How much did {key} get?", f"{key} sold for {price} coins."),
        ]
        if self.style != 1:
            turns.append(Turn(f"When did {key} sell?", f"{key} sold on day {day}."))
        return Card(line, tuple(turns))


class Residents(People):
    title = "Residents"

    def card(self, key: str) -> Card:
        rng = self.rng
        city, job, pet = rng.choice(CITY), rng.choice(JOB), rng.choice(PET)
        phone = number(rng, 5)
        line = (
            f"{key} lives in {city}, works as a {job}, keeps a {pet} and has phone {phone}.",
            f"{key} lives in {city} and has phone {phone}.",
            f"{key} works as a {job} and has phone {phone}.",
        )[self.style]
        turns = [Turn(f"What is the phone of {key}?", f"{key} has phone {phone}.")]
        if self.style != 2:
            turns.append(Turn(f"Where does {key} live?", f"{key} lives in {city}."))
        if self.style != 1:
            turns.append(Turn(f"What is the job of {key}?", f"{key} works as a {job}."))
        if self.style == 0:
            turns.append(Turn(f"Which pet does {key} keep?", f"{key} keeps a {pet}."))
        return Card(line, tuple(turns))


class Stock(Kind):
    title = "Inventory"

    def key(self) -> str:
        return f"{self.rng.choice(ADJECTIVE)} {self.rng.choice(ITEM)}"

    def card(self, key: str) -> Card:
        rng = self.rng
        shelf, room = number(rng, 2), rng.choice(PLACE)
        count, price = quantity(rng), quantity(rng)
        turns = (
            Turn(f"Where is the {key}?", f"The {key} is in the {room}."),
            Turn(f"On which shelf is the {key}?", f"The {key} is on shelf {shelf}."),
            Turn(f"What is the stock of the {key}?", f"The {key} has stock {count}."),
            Turn(f"What is the price of the {key}?", f"The {key} has price {price}."),
        )
        line = f"The {key} is in the {room} on shelf {shelf}, stock {count}, price {price}."
        return Card(line, turns)

    def absent(self, key: str) -> str:
        return f"The {key} is not in the ledger."


KINDS: tuple[type[Kind], ...] = (Codes, Sales, Residents, Stock)
