from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.speculation.drafter import Proposal
from octavo.engine.speculation.ngram_index import NGRAM, NgramIndex, TextIndex
from octavo.engine.speculation.suffix import MAX_MATCH, NgramDrafter

token_lists = st.lists(st.sampled_from([0, 1, 2, 150_000]), max_size=400)


def ends_before(tokens: list[int]) -> list[int]:
    last = tokens[-NGRAM:]
    return [end for end in range(len(tokens) - 2, NGRAM - 2, -1) if tokens[end - NGRAM + 1 : end + 1] == last]


@given(token_lists, st.lists(st.integers(1, 120), max_size=12))
def test_an_index_that_grows_finds_every_place(tokens: list[int], pieces: list[int]) -> None:
    index, stop = NgramIndex(), 0
    for piece in (*pieces, len(tokens)):
        stop = min(len(tokens), stop + piece)
        known = tokens[:stop]
        index.extend(known)
        found = [
            end for end in index.places(known, 999) if known[end - NGRAM + 1 : end + 1] == known[-NGRAM:]
        ]
        assert found == (ends_before(known) if len(known) >= NGRAM else [])
    assert len(index) == len(tokens)


@given(token_lists.filter(bool), st.lists(st.integers(1, 120), max_size=12), st.integers(0, 400))
def test_prompt_and_output_are_found_as_one_text(
    tokens: list[int], pieces: list[int], num_prompt: int
) -> None:
    num_prompt = min(num_prompt, len(tokens) - 1)
    index, stop = TextIndex(NgramIndex(), num_prompt), num_prompt
    for piece in (1, *pieces, len(tokens)):
        stop = min(len(tokens), stop + piece)
        known = tokens[:stop]
        expected = ends_before(known) if len(known) >= NGRAM else []
        index.extend(known)
        found = index.places(known, 999)
        assert [end for end in found if known[end - NGRAM + 1 : end + 1] == known[-NGRAM:]] == expected


def test_memory_is_bounded() -> None:
    index = NgramIndex()
    tokens = [i * 7919 % 150_001 for i in range(33_000)]
    for stop in (1, 4, 30_000, 33_000):
        index.extend(tokens[:stop])
    assert index.num_bytes <= 20 * len(tokens)


@given(token_lists, st.integers(1, 20))
def test_drafts_follow_the_longest_match(tokens: list[int], most: int) -> None:
    drafts, match = NgramDrafter().propose(tokens, most)
    places = ends_before(tokens)[:8] if len(tokens) >= NGRAM else []
    if not drafts:
        assert not places
        return

    def common(end: int) -> int:
        pairs = zip(reversed(tokens[: end + 1]), reversed(tokens), strict=False)
        length = next((n for n, (a, b) in enumerate(pairs) if a != b), end + 1)
        return min(length, MAX_MATCH)

    assert len(drafts) == most
    assert match == max(map(common, places))

    longest = max(map(common, places))
    best = next(end for end in places if common(end) == longest)
    grown = [*tokens, *drafts]
    assert all(grown[len(tokens) + i] == grown[best + 1 + i] for i in range(most))


def test_unknown_texts_get_no_drafts() -> None:
    drafter = NgramDrafter()
    for known in ([], [1, 2], [1, 2, 3, 4]):
        assert drafter.propose(known, 4) == Proposal()
    assert drafter.propose([1, 2, 3, 4, 1, 2, 3], 4) == Proposal([4, 1, 2, 3], 3)
