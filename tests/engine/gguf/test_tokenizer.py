from __future__ import annotations

import io
import random
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from octavo.engine.api.errors import ModelLoadError
from octavo.engine.gguf.architectures import Metadata
from octavo.engine.gguf.tokenizer import end_ids, settings_of, tokenizer_of

TRAINING = "the sea is a vast and mysterious realm teeming with life über straße naïve 東京 日本 12 345 x_y"
TEXTS = st.text(st.sampled_from("abcdehilmnorst \n\t.,!'1290ßü東😀_"), max_size=60)


def sentence_piece() -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    draw = random.Random(5)
    lines = [" ".join(draw.choices(TRAINING.split(), k=12)) for _ in range(400)]
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=file, model_type="bpe", vocab_size=400,
        byte_fallback=True,
        character_coverage=0.99, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    size = model.get_piece_size()
    types = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in range(size)
    ]
    return model, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


MODEL, METADATA = sentence_piece()
CONVERTED = tokenizer_of(Metadata(METADATA))


@pytest.mark.parity
@given(text=TEXTS)
def test_sentence_piece_texts_have_its_own_ids(text: str) -> None:
    expected = MODEL.encode(text)
    assert CONVERTED.encode(text).ids == (expected if text else [])
    assert CONVERTED.decode(expected) == MODEL.decode(expected)


def byte_level(pre: str) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<|im_end|>"]
    return tokenizer_of(
        Metadata(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": pre,
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": [*[1] * len(alphabet), 3],
                "tokenizer.ggml.merges": [],
            }
        )
    )


PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False)
KNOWN = {
    "gpt-2": PLAIN,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), PLAIN]),
}


@pytest.mark.parity
@pytest.mark.parametrize("pre", KNOWN)
@given(text=TEXTS)
def test_patterns_split_as_the_library_does(pre: str, text: str) -> None:
    assert byte_level(pre).pre_tokenizer.pre_tokenize_str(text) == KNOWN[pre].pre_tokenize_str(text)


def test_the_pattern_of_qwen2_is_transformers_own() -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    from octavo.engine.gguf.tokenizer import _PATTERNS

    assert _PATTERNS["qwen2"] == (PRETOKENIZE_REGEX,)


def test_unknown_patterns_are_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre must be one of .*, got 'klingon'"):
        byte_level("klingon")


def test_the_begin_token_is_added_when_the_file_asks() -> None:
    framed = tokenizer_of(Metadata({**METADATA, "tokenizer.ggml.add_bos_token": True}))
    assert framed.encode("the sea").ids == [1, *MODEL.encode("the sea")]


def test_control_tokens_end_answers_and_are_special() -> None:
    tokenizer = byte_level("qwen2")
    (ids,) = (tokenizer.encode("a<|im_end|>").ids,)
    assert ids[-1] == 256
    assert tokenizer.decode(ids) == "a"


def test_settings_name_special_tokens_and_templates() -> None:
    meta = Metadata({**METADATA, "tokenizer.chat_template": "{{ messages }}"})
    assert settings_of(meta)["eos_token"] == "</s>"
    assert settings_of(meta)["chat_template"] == "{{ messages }}"
    assert end_ids(meta) == [2]
