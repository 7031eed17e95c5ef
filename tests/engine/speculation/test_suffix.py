from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.speculation.drafter import Proposal
from octavo.engine.speculation.drafting import Speculation
from octavo.engine.speculation.ngram_index import NGRAM, NgramIndex, TextIndex
from octavo.engine.speculation.recent_outputs import BETWEEN, RecentOutputs
from octavo.engine.speculation.suffix import TOKENS_PER_MATCH, SuffixDrafter

token_lists = st.lists(st.sampled_from([0, 1, 2, 150_000]), max_size=300)


@given(token_lists, token_lists, st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 12))
def test_drafts_followed_the_suffix_in_earlier_text(
    before: list[int], tokens: list[int], pieces: list[int], most: int
) -> None:
    recent = RecentOutputs()
    recent.add(before)
    drafter, stop, proposal = SuffixDrafter(recent=recent), 0, Proposal()
    for piece in (*pieces, len(tokens)):
        if stop == len(tokens):
            break
        stop = min(len(tokens), stop + piece)
        proposal = drafter.propose(tokens[:stop], most)
        if not proposal.tokens:
            continue
        assert len(proposal.tokens) <= min(most, TOKENS_PER_MATCH * proposal.match)
        assert proposal.match >= NGRAM
        suffix = tokens[stop - min(stop, proposal.match) : stop]
        texts = [tokens[:stop], list(recent.tokens)]
        assert any(
            text[start : start + len(suffix)] == suffix
            for text in texts
            for start in range(len(text) - len(suffix) + 1)
        )
    if len(tokens) > 3 and tokens[-3:] in [tokens[i : i + 3] for i in range(len(tokens) - 3)]:
        assert drafter.propose(tokens, most).tokens, "its own text says something"


def test_most_places_decide_and_matches_grow_with_the_text() -> None:
    drafter = SuffixDrafter()
    text = [1, 2, 3, 7, 7, 1, 2, 3, 8, 8, 1, 2, 3, 8, 9]
    assert drafter.propose([*text, 1, 2, 3], 1) == Proposal([8], 3)
    drafter = SuffixDrafter()
    text = [*range(10, 50), 1, *range(10, 14)]
    assert drafter.propose(text, 20) == Proposal([*range(14, 22)], 4), "two for each token that matches"
    text += range(14, 22)
    assert drafter.propose(text, 20) == Proposal([*range(22, 42)], 12)


def test_outputs_of_one_tenant_are_found_and_others_are_not() -> None:
    speculation = Speculation("suffix", max_drafts=4)

    def new(owner: str, prompt: list[int]):  # type: ignore[no-untyped-def]
        [made] = speculation.begin(None, [None], num_prompt=len(prompt), owner=owner)
        assert made is not None
        return made

    first = new("a", [1, 2])
    said = [1, 2, 3, 4, 5, 6, 7, 8]
    first.search(said, 100)
    first.finished(said)
    for owner, drafts in ("a", (6, 7, 8)), ("b", ()):
        later = new(owner, [9, 3, 4])
        assert (later.search([9, 3, 4, 5], 100) > 0) is bool(drafts)
        assert later.rated_drafts()[0] == drafts


def test_recent_outputs_are_bounded_and_the_latest_stay() -> None:
    recent = RecentOutputs(capacity=1000)
    drafter = SuffixDrafter(recent=recent)
    for number in range(200):
        recent.add([number, *range(1000, 1030 + number % 7), number])
        drafter.propose([5, 5, 1003, 1004, 1005], 4)
        assert len(recent.tokens) <= 1000
        assert recent.num_bytes <= 24 * 1000
    assert recent.generation > 5
    assert drafter.propose([5, 5, 1003, 1004, 1005, 1006], 2) == Proposal([1007, 1008], 4)
    recent.add(range(5000, 9000))
    assert len(recent.tokens) <= 1000
    assert recent.tokens[-1] == 8999
    assert RecentOutputs().tokens.itemsize == 4
    recent.add([1])
    assert recent.tokens[-1] != BETWEEN, "what is too short is not kept"


def test_samples_of_a_request_index_their_prompt_once() -> None:
    prompt = NgramIndex()
    tokens = [i * 7919 % 1009 for i in range(500)]
    samples = [TextIndex(prompt, len(tokens)) for _ in range(3)]
    for number, index in enumerate(samples):
        text = [*tokens, number, *tokens[100:104]]
        index.extend(text)
        assert 103 in index.places(text, 9)
        text += [*tokens[200:203], *tokens[100:104]]
        index.extend(text)
        ends = [end for end in index.places(text, 9) if text[end - 2 : end + 1] == text[-3:]]
        assert ends == [504, 103], "in what it said itself, then in the prompt"
    assert len(prompt) == 500
    assert all(len(index._output) == 12 for index in samples)
