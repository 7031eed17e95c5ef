from __future__ import annotations

import json
import re

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models

from fakes import byte_tokenizer
from ledger_runner import EOS
from octavo.engine.tokenizer.detokenizer import REPLACEMENT, Detokenizer, StopChecker
from octavo.engine.tokenizer.tokenizer import Tokenizer

BYTES = byte_tokenizer()


def sentencepiece_like() -> Tokenizer:
    """Tokens start with a space; other text becomes byte tokens, as in Llama 2."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁a", "▁b", "a", "b", "▁", "é", "▁▁", "漢"):
        vocab[word] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    state = json.loads(backend.to_str())
    state["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)))


WORDS = sentencepiece_like()


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [detokenizer.add(token) for token in token_ids]


def squeeze(text: str) -> str:
    return re.sub(f"{REPLACEMENT}+", REPLACEMENT, text)


def without_tail(text: str) -> str:
    return text.rstrip(REPLACEMENT)


@given(st.text(), st.lists(st.integers(1, 3)))
@example("aé漢😀", [2, 2, 3])
@example("👩‍👩‍👧", [])
def test_every_character_of_a_text_comes_out_once_and_whole(text: str, lengths: list[int]) -> None:
    rest, tokens = text.encode(), []
    for length in [*lengths, *[1] * len(rest)]:
        tokens.append(rest[:length])
        rest = rest[length:]
    detokenizer = Detokenizer(lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace"))
    pieces = stream(detokenizer, list(range(len(tokens))))
    assert "".join(pieces) == without_tail(text)


@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=40))
def test_bytes_that_are_no_text_show_as_replacement_characters(token_ids: list[int]) -> None:
    streamed = "".join(stream(BYTES.detokenizer(), token_ids))
    assert without_tail(squeeze(streamed)) == without_tail(squeeze(BYTES.decode(token_ids)))


pieces_of_words = st.lists(
    st.one_of(
        st.integers(256, WORDS.vocab_size - 1).map(lambda token: [token]),
        st.sampled_from("aé漢😀").map(lambda character: list(character.encode())),
    ),
    max_size=20,
).map(lambda lists: [token for tokens in lists for token in tokens])


@given(pieces_of_words, pieces_of_words)
def test_words_and_characters_in_bytes_come_out_as_the_whole_text(
    context: list[int], token_ids: list[int]
) -> None:
    context.append(WORDS._backend.get_vocab()["a"])
    streamed = "".join(stream(WORDS.detokenizer(context), token_ids))
    whole = WORDS.decode(context + token_ids)
    assert streamed == whole[len(WORDS.decode(context)) :]


def test_a_word_after_a_prompt_keeps_its_space() -> None:
    vocab = WORDS._backend.get_vocab()
    assert stream(WORDS.detokenizer([vocab["a"]]), [vocab["▁b"], vocab["▁a"]]) == [" b", " a"]
    assert stream(WORDS.detokenizer(), [vocab["▁b"], vocab["▁a"]]) == ["b", " a"]


def test_special_tokens_have_no_text() -> None:
    assert stream(BYTES.detokenizer(), [ord("a"), EOS, ord("b")]) == ["a", "", "b"]


def test_a_tokens_cost_does_not_depend_on_how_many_came_before() -> None:
    longest = 0

    def decode(token_ids: list[int] | tuple[int, ...]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return BYTES.decode(token_ids)

    for token_ids in (list(b"word " * 100), [0x80] * 300, [0xF0, 0x9F] * 100, list("漢".encode()) * 100):
        stream(Detokenizer(decode), token_ids)  # type: ignore[arg-type]
    stream(Detokenizer(lambda token_ids: decode(token_ids) and ""), [65] * 500)  # type: ignore[arg-type]
    assert longest <= 33


def test_nonsense_does_not_hold_back_text_for_ever() -> None:
    pieces = stream(BYTES.detokenizer(), [0x80] * 40)
    assert sum(map(len, pieces)) > 20


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text before the stop string that ends first, and this stop string (None: no stop)."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
@example(["abcd"], ["bc", "abcd"])
@example(["aab"], ["ab", "aab"])
def test_stop_strings_are_found_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown = ""
    for piece in pieces:
        shown += checker.add(piece)
        if checker.match is not None:
            break
    if checker.match is None:
        shown += checker.flush()
    assert (shown, checker.match) == first_stop("".join(pieces), stops)


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    checker = StopChecker(["\n\nUser:"])
    assert checker.add("Hi.\n") == "Hi."
    assert checker.add("\nUse") == ""
    assert checker.add("ful") == "\n\nUseful"
    assert checker.add("\n\n") == ""
    assert checker.flush() == "\n\n"


def test_after_a_match_nothing_more_is_shown() -> None:
    checker = StopChecker(["stop"])
    assert checker.add("go, stop, and go") == "go, "
    assert checker.match == "stop"
    assert checker.add("more") == checker.flush() == ""


def test_stop_strings_may_be_or_contain_special_tokens() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "<t>": 3, "<s><t>": 4}))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<s>", "<t>"])
    tokenizer = Tokenizer(backend)

    def said(stops: list[str], token_ids: list[int]) -> tuple[str, str | None]:
        checker, detokenizer = tokenizer.stop_checker(stops), tokenizer.detokenizer()
        shown = "".join(checker.add(detokenizer.add(token) + checker.marker(token)) for token in token_ids)
        return shown + checker.flush(), checker.match

    assert said(["<s>"], [0, 2, 1]) == ("a", "<s>")
    assert said(["zz", "<t>"], [0, 2, 1, 3, 0]) == ("ab", "<t>")
    assert said(["a<s>b"], [1, 0, 2, 1, 1]) == ("b", "a<s>b")
    assert said(["a<s>b"], [0, 2, 2, 1]) == ("ab", None)
    assert said(["<s><t>"], [0, 2, 3]) == ("a", "<s><t>")
    assert said(["<s>"], [4, 0]) == ("", "<s>")
    assert said([], [0, 2, 1]) == ("ab", None)
