"""Training texts other than ledgers: recall drills, lists, stories."""

from __future__ import annotations

from random import Random

from octavo_lab.bench.ledgers.words import (
    ADJECTIVE,
    ANSWER_WEIGHT,
    CITY,
    CONTEXT_WEIGHT,
    END,
    FEELING,
    FIRST,
    ITEM,
    JOB,
    LAST,
    PAIRS_OF_DIGITS,
    PET,
    PLACE,
    PROSE_WEIGHT,
    START,
    STOP,
    WEATHER,
    Segment,
    ask,
    estimated_tokens,
    number,
)

_OPENINGS = (
    "Once there was a {job} named {hero} who lived in {city}.",
    "{hero} was a {job} in {city} and had a {pet}.",
    "In the town of {city} lived {hero}, a {feeling} {job}.",
    "Long ago {hero} worked as a {job} near the {place} in {city}.",
)
_EVENTS = (
    "One morning {hero} found a {adjective} {item} in the {place}.",
    "One day the {adjective} {item} was gone from the {place}.",
    "When the {weather} came, {hero} carried the {adjective} {item} to the {place}.",
    "One evening {friend} came to the {place} and asked for the {adjective} {item}.",
)
_MIDDLES = (
    "{friend} said that the {item} was worth many coins.",
    "The {pet} slept by the door and heard nothing.",
    "{hero} felt {feeling} and sat down to think.",
    "They walked through the {weather} until they reached the {place}.",
    '"Keep the {item} safe," said {friend}.',
    "Nobody in {city} had ever seen such a thing.",
    "{hero} wrote everything down in the ledger.",
    "{friend} laughed and told an old tale about the {place}.",
    "At noon the bell rang and the whole market grew quiet.",
)
_ENDINGS = (
    "In the end {hero} gave the {item} to {friend}, and both were {feeling}.",
    "That night {hero} went home with the {item} and slept well.",
    "From that day on, {hero} and {friend} were good friends.",
    "And the {item} is still in the {place} today.",
)
_SMALL_TALK = (
    ("Hello!", "Hello! Give me a ledger and ask me about it."),
    ("Who are you?", "I am a tiny model that reads ledgers."),
    ("What can you do?", "I can read ledgers, copy and sort short lists, count and tell short stories."),
    ("Thank you.", "You are welcome."),
    ("Good bye.", "Good bye."),
    ("What is the capital of France?", "I only know what is in the ledger."),
)


def recall(rng: Random, length: int) -> list[Segment]:
    """Return a key-value recall drill: a short table, then keys and values again in random order."""
    style = rng.randrange(4)
    rows: dict[str, str] = {}
    size = 4
    budget = length * rng.choice((0.25, 0.4, 0.5))
    while size < budget:
        if style == 0:
            key, value = f"{rng.choice(ADJECTIVE)} {rng.choice(PLACE)}", number(rng, 4)
        elif style == 1:
            key, value = rng.choice(FIRST), rng.choice(CITY)
        elif style == 2:
            key, value = f"{rng.choice(FIRST)} {rng.choice(LAST)}", rng.choice(JOB)
        else:
            key, value = rng.choice(FIRST + ITEM), number(rng, 3)
        if key in rows:
            size += 1
            continue
        rows[key] = value
        size += estimated_tokens(f"{key}: {value}\n")
    text = "".join(f"{key}: {value}\n" for key, value in rows.items())
    segments: list[Segment] = [(f"{START}user\n{text}{STOP}\n", CONTEXT_WEIGHT)]
    table = list(rows.items())
    while size < length:
        key, value = rng.choice(table)
        segments.append((f"{START}{key}:", CONTEXT_WEIGHT))
        segments.append((f" {value}{STOP}", ANSWER_WEIGHT))
        size += estimated_tokens(f"{key}: {value}") + 2
    return segments


def loop(rng: Random, length: int) -> list[Segment]:
    pool = FIRST + CITY + ADJECTIVE + ITEM + PLACE + LAST + PAIRS_OF_DIGITS
    words = "".join(f" {word}" for word in rng.sample(pool, rng.randrange(4, max(6, min(60, length // 3)))))
    repeats = length // max(1, estimated_tokens(words)) + 1
    return [(words, CONTEXT_WEIGHT), (words * repeats, ANSWER_WEIGHT)]


def pairs(rng: Random, length: int) -> list[Segment]:
    keys, values = rng.sample((FIRST + LAST, CITY + JOB, ADJECTIVE, ITEM + PLACE, PAIRS_OF_DIGITS), 2)
    count = min(rng.randrange(3, max(5, length // 6)), len(keys), len(values))
    table = list(zip(rng.sample(keys, count), rng.sample(values, count), strict=True))
    segments: list[Segment] = [("".join(f" {key} {value}" for key, value in table), CONTEXT_WEIGHT)]
    for _ in range((length - 2 * count) // 2):
        key, value = rng.choice(table)
        segments += [(f" {key}", CONTEXT_WEIGHT), (f" {value}", ANSWER_WEIGHT)]
    return segments


def echo(rng: Random, length: int) -> list[Segment]:
    pool = FIRST + CITY + ADJECTIVE + ITEM + PLACE + LAST
    width = max(8, min(60, length // 2 - 8))
    words = " ".join(
        rng.choice(pool) if rng.random() < 0.8 else number(rng, rng.choice((2, 4)))
        for _ in range(rng.randrange(6, width))
    )
    return [(ask(f"Repeat: {words}"), CONTEXT_WEIGHT), (f"{words}{STOP}", ANSWER_WEIGHT)]


def lists(rng: Random) -> list[Segment]:
    """Return a request to count, to sort or to copy a short list, and the answer."""
    choice = rng.randrange(4)
    if choice == 0:
        first = rng.randrange(1, 90)
        last = first + rng.randrange(2, 10)
        query = f"Count from {first} to {last}."
        answer = " ".join(map(str, range(first, last + 1)))
    elif choice == 1:
        values = rng.sample(range(10, 100), rng.randrange(3, 8))
        query, answer = "Sort: " + " ".join(map(str, values)), " ".join(map(str, sorted(values)))
    elif choice == 2:
        words = rng.sample(ITEM + PET + PLACE, rng.randrange(3, 9))
        query, answer = "Copy: " + ", ".join(words), ", ".join(words)
    else:
        words = sorted(rng.sample(ITEM + PET, rng.randrange(3, 6)))
        query, answer = "Sort: " + ", ".join(rng.sample(words, len(words))), ", ".join(words)
    return [(ask(query), CONTEXT_WEIGHT), (f"{answer}{STOP}", ANSWER_WEIGHT)]


def story(rng: Random) -> list[Segment]:
    """Return a short story from templates, as the answer to a request or as plain text."""
    hero, friend = rng.sample(FIRST, 2)
    facts = {"hero": hero, "friend": friend}
    for name, pool in (
        ("adjective", ADJECTIVE),
        ("item", ITEM),
        ("place", PLACE),
        ("city", CITY),
        ("job", JOB),
        ("pet", PET),
        ("feeling", FEELING),
        ("weather", WEATHER),
    ):
        facts[name] = rng.choice(pool)
    opening, event = rng.choice(_OPENINGS), rng.choice(_EVENTS)
    middles = rng.sample(_MIDDLES, rng.randrange(2, 6))
    text = " ".join((opening, event, *middles, rng.choice(_ENDINGS))).format(**facts)
    if rng.random() < 0.5:
        long = f"Tell me a story about {hero} and a {facts['item']}."
        query = rng.choice((long, f"Write a short story about {hero}."))
        return [(ask(query), CONTEXT_WEIGHT), (f"{text}{STOP}", PROSE_WEIGHT)]
    return [(f"{text}{END}", PROSE_WEIGHT)]


def small_talk(rng: Random) -> list[Segment]:
    query, answer = rng.choice(_SMALL_TALK)
    return [(ask(query), CONTEXT_WEIGHT), (f"{answer}{STOP}", PROSE_WEIGHT)]


def filler(rng: Random) -> list[Segment]:
    draw = rng.random()
    if draw < 0.55:
        return story(rng)
    return lists(rng) if draw < 0.92 else small_talk(rng)
