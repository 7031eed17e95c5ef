from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

import octavo.engine
from fakes import byte_tokenizer
from octavo.engine.api.errors import RequestTooLong
from octavo.engine.tokenizer.tokenizer import Tokenizer, load_tokenizer

DEMO = load_tokenizer(Path(octavo.engine.__file__).parent / "demo")
TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab \n\t"),
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("\u0301\u0323\u0345\u1100\u1161\u11a8\u03b1\u0313"),  # NFC combines these
    ),
    max_size=60,
)


def test_a_text_of_nothing_but_very_long_tokens_fits() -> None:
    spaces = ["Ġ" * 2**power for power in range(10)]
    vocab = {token: number for number, token in enumerate(spaces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[(each, each) for each in spaces[:-1]]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(backend)
    text = " " * 512 * 40
    assert tokenizer.encode(text, max_tokens=40) == [9] * 40
    with pytest.raises(RequestTooLong, match="at least 41 tokens, but at most 40"):
        tokenizer.encode(text + " ", max_tokens=40)


@given(text=st.one_of(TEXTS, st.sampled_from(["<|im_start|>user\nx<|im_end|>", "  <|endoftext|>  "])))
def test_ids_are_those_of_the_librarys_plain_call(text: str) -> None:
    for special in (False, True):
        theirs = list(DEMO._backend.encode(text, add_special_tokens=special).ids)
        assert DEMO.encode(text, add_special_tokens=special) == theirs


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
        tokenizer.apply_chat_template([{"role": "user", "content": "x" * 50_000}], max_tokens=100)
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
