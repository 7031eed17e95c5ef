"""Conversion of a GGUF file's tokenizer to ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ..api.errors import ModelLoadError
from .architectures import Metadata

_UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


def _cased(digits: str, ending: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "default", "phi-2"), (_GPT2,)),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"), (_words(r"\p{N}{1,3}"),)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_words(r"\p{N}"),)),
    "tekken": (_cased(r"\p{N}", ""),),
    "gpt-4o": (_cased(r"\p{N}{1,3}", f"{_CONTRACTION}?"),),
}
_WHOLE_TOKENS_FIRST = {"llama-bpe", "llama3", "llama-v3", "tekken"}
_END_OF_TURN = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>",
    "<|return|>", "<EOT>",
}  # fmt: skip


def tokenizer_of(meta: Metadata) -> Tokenizer:
    """Return the tokenizer. Raises ModelLoadError for an unsupported kind or pattern."""
    kind = meta.get("tokenizer.ggml.model")
    tokens: list[str] = meta.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise ModelLoadError(
            "the GGUF file has no tokenizer.ggml.tokens; convert the model again with its tokenizer"
        )
    types: list[int] = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if kind == "gpt2":
        built = _byte_level(meta, tokens)
    elif kind == "llama":
        built = _sentence_piece(meta, tokens, types)
    else:
        raise ModelLoadError(
            f"tokenizer.ggml.model must be gpt2 or llama, got {kind!r}; give a folder of the model in "
            "safetensors"
        )
    for type_ in (_CONTROL, _USER):
        built.add_tokens(
            [
                AddedToken(token, special=type_ == _CONTROL, normalized=False)
                for token, found in zip(tokens, types, strict=True)
                if found == type_
            ]
        )
    _add_frame(built, meta, tokens)
    return built


def settings_of(meta: Metadata) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: special tokens and chat templates."""
    tokens: Sequence[str] = meta.get("tokenizer.ggml.tokens")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = meta.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            settings[f"{name}_token"] = tokens[index]
    template = meta.get("tokenizer.chat_template")
    named = meta.get("tokenizer.chat_templates") or []
    if named:
        texts = {name: meta.get(f"tokenizer.chat_template.{name}") for name in named}
        settings["chat_template"] = [
            {"name": name, "template": text} for name, text in {"default": template, **texts}.items() if text
        ]
    elif template:
        settings["chat_template"] = template
    return settings


def end_ids(meta: Metadata) -> list[int]:
    """Return the ids of tokens that end an answer, in rising order."""
    tokens: Sequence[str] = meta.get("tokenizer.ggml.tokens")
    named = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return sorted(
        {id for id in named if id is not None and id < len(tokens)}
        | {id for id, text in enumerate(tokens) if text in _END_OF_TURN}
    )


def _byte_level(meta: Metadata, tokens: Sequence[str]) -> Tokenizer:
    name = meta.get("tokenizer.ggml.pre", "default")
    if name not in _PATTERNS:
        raise ModelLoadError(
            f"tokenizer.ggml.pre must be one of {', '.join(sorted(_PATTERNS))}, got {name!r}; give a "
            "folder of the model in safetensors"
        )
    if meta.get("tokenizer.ggml.merges") is None:
        raise ModelLoadError(
            "the GGUF file has no tokenizer.ggml.merges; convert the model again with its tokenizer"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges")]
    vocab = {token: id for id, token in enumerate(tokens)}
    model = BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=name in _WHOLE_TOKENS_FIRST)
    built = Tokenizer(model)
    if name == "qwen2":
        built.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[name]]
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    built.decoder = decoders.ByteLevel()
    return built


def _sentence_piece(meta: Metadata, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    scores: list[float] = meta.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise ModelLoadError(
            f"tokenizer.ggml.scores must have a score per token ({len(tokens)}), got {len(scores)}; "
            "convert the model again"
        )
    vocab = {token: id for id, token in enumerate(tokens)}
    ordinary = {
        token for token, type_ in zip(tokens, types, strict=True) if type_ not in (_CONTROL, _BYTE, _UNUSED)
    }
    ranked = sorted(
        (
            (-scores[vocab[left + right]], vocab[left], vocab[right], left, right)
            for left, right in _splits(ordinary)
        )
    )
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == _UNKNOWN), None)
    merges = [(left, right) for *_, left, right in ranked]
    built = Tokenizer(
        BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in types)
    )
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    ending = [decoders.Strip(" ", 1, 0)] if prefix else []
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ending]
    )
    return built


def _splits(pieces: set[str]) -> Iterator[tuple[str, str]]:
    for piece in pieces:
        for place in range(1, len(piece)):
            if piece[:place] in pieces and piece[place:] in pieces:
                yield piece[:place], piece[place:]


def _add_frame(built: Tokenizer, meta: Metadata, tokens: Sequence[str]) -> None:
    is_sentence_piece = meta.get("tokenizer.ggml.model") == "llama"
    begin, end = (
        tokens[id] if asked and id is not None and 0 <= id < len(tokens) else None
        for asked, id in (
            (
                meta.get("tokenizer.ggml.add_bos_token", is_sentence_piece),
                meta.get("tokenizer.ggml.bos_token_id"),
            ),
            (meta.get("tokenizer.ggml.add_eos_token", False), meta.get("tokenizer.ggml.eos_token_id")),
        )
    )
    framed = [token for token in (begin, "$A", end) if token is not None]
    if len(framed) > 1:
        specials = [(token, built.token_to_id(token)) for token in (begin, end) if token is not None]
        built.post_processor = processors.TemplateProcessing(single=framed, special_tokens=specials)
