from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

import octavo.engine
from fakes import byte_tokenizer
from octavo.engine.api.errors import RequestTooLong
from octavo.engine.tokenizer.tokenizer import UNPROVEN_CHARACTERS, Tokenizer, load_tokenizer, longest_token

DEMO = load_tokenizer(Path(octavo.engine.__file__).parent / "demo")
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def _byte_level() -> tokenizers.Tokenizer:
    words = ["ab", "abab", "Ġa", "ĠĠ", "ĠĠĠĠ"]
    merges = [("a", "b"), ("ab", "ab"), ("Ġ", "a"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
    vocab = {token: number for number, token in enumerate([*sorted(ALPHABET), *words])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def _composing() -> tokenizers.Tokenizer:
    backend = _byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("ab", "b")])
    return backend


def _byte_fallback() -> tokenizers.Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ("a", "b", "▁", "ab"):
        vocab[token] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def _unknown_one_by_one() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(
        models.BPE(vocab={"<unk>": 0, "a": 1, "b": 2, "ab": 3}, merges=[("a", "b")], unk_token="<unk>")
    )


PROVEN = {
    "byte level": _byte_level(),
    "composing": _composing(),
    "byte fallback": _byte_fallback(),
    "unknown one by one": _unknown_one_by_one(),
    "demo": DEMO._backend,
}
TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab \n\t"),
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("\u0301\u0323\u0345\u1100\u1161\u11a8\u03b1\u0313"),  # NFC combines these
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", PROVEN)
@given(text=TEXTS)
def test_min_tokens_is_a_lower_bound(name: str, text: str) -> None:
    backend = PROVEN[name]
    tokenizer = Tokenizer(backend)
    assert tokenizer.longest_token < UNPROVEN_CHARACTERS
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) >= tokenizer.min_tokens(text)
    assert tokenizer.encode(text, add_special_tokens=False, max_tokens=len(ids)) == ids, "it fits exactly"


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "demo"])
def test_a_text_of_nothing_but_the_longest_token_fits(name: str) -> None:
    backend = PROVEN[name]
    tokenizer = Tokenizer(backend)
    vocab = backend.get_vocab()
    longest = max(
        (token for token in vocab if not token.startswith("<")), key=lambda token: (len(token), token)
    )
    text = longest.replace("Ġ", " ") * 40
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert 40 <= len(ids) <= 41, "with the prefix of some"
    assert tokenizer.encode(text, add_special_tokens=False, max_tokens=len(ids)) == ids


@given(text=st.one_of(TEXTS, st.sampled_from(["<|im_start|>user\nx<|im_end|>", "  <|endoftext|>  "])))
def test_ids_are_those_of_the_librarys_plain_call(text: str) -> None:
    for special in (False, True):
        theirs = list(DEMO._backend.encode(text, add_special_tokens=special).ids)
        assert DEMO.encode(text, add_special_tokens=special) == theirs


def _dropping() -> dict[str, tokenizers.Tokenizer]:
    spaces = _byte_level()
    spaces.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    removed = _byte_level()
    removed.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    stripped = _byte_level()
    stripped.normalizer = normalizers.Strip()
    squeezed = _byte_level()
    squeezed.normalizer = normalizers.Replace(tokenizers.Regex(" +"), " ")
    greedy = _byte_level()
    greedy.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    fused = tokenizers.Tokenizer(
        models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True)
    )
    silent = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    return {
        "spaces": spaces, "removed": removed, "stripped": stripped, "squeezed": squeezed, "greedy": greedy,
        "fused": fused, "silent": silent, "words": words,
    }  # fmt: skip


@pytest.mark.parametrize("name", _dropping())
def test_tokenizers_that_drop_text_have_a_lower_bound(name: str) -> None:
    backend = _dropping()[name]
    assert longest_token(backend, backend.get_vocab()) >= UNPROVEN_CHARACTERS


class _NotToBeUsed:
    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} was called")


def test_texts_that_cannot_fit_are_refused_before_encoding() -> None:
    tokenizer = byte_tokenizer()
    longest = tokenizer.longest_token
    tokenizer._backend = _NotToBeUsed()  # type: ignore[assignment]
    with pytest.raises(RequestTooLong, match="at least 101 tokens, but at most 100 are allowed"):
        tokenizer.encode("x" * (100 * longest + 1), max_tokens=100)
    with pytest.raises(RequestTooLong, match="at least 1"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x" * 5000}], max_tokens=100)
    with pytest.raises(RequestTooLong, match="chat of 101 messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": ""}] * 101, max_tokens=100)


def test_other_threads_continue_while_a_long_text_is_encoded() -> None:
    text = ("What the interpreter's lock holds up is everybody. " * 20_000)[:600_000]
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before = ticks
        DEMO.encode(text)
        passed = ticks - before
    finally:
        done.set()
        thread.join()
    assert passed > 20, f"{passed} ticks in some hundreds of milliseconds"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_long_text_is_freed() -> None:
    text = ("Memory that nobody gives back is gone. " * 60_000)[:2_000_000]
    DEMO.encode(text[:1000])
    before = _resident_bytes()
    assert DEMO.encode(text)
    assert _resident_bytes() - before < 64 * 2**20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
