from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import octavo.engine
from octavo.engine.api.errors import ModelLoadError
from octavo.engine.memory.configuration import rope_settings
from octavo.engine.memory.model_files import read_config
from octavo.engine.tokenizer.tokenizer import Tokenizer, load_tokenizer

DEMO = Path(octavo.engine.__file__).parent / "demo"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
TEXT = "Once <|im_start|>there was<|im_end|> é漢<tool><extra> a baker.<|endoftext|>"
CHAT = [{"role": "user", "content": "Tell me <b>more</b>."}]
SHOWS_TOKENS = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ messages[0].content }}"
TOOL = {"content": "<tool>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}

Change = Callable[[Path], None]


def edit(name: str, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text()) if file.exists() else {}
        content |= changes
        file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    return change


def write(name: str, text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return change


def remove(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def split_vocabulary(folder: Path) -> None:
    """Write ``vocab.json`` and ``merges.txt`` of a byte-level BPE, in GPT-2's format."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    vocab = model["vocab"] | {token["content"]: token["id"] for token in added}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (folder / "tokenizer.json").unlink()


def several(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


SETTINGS, MAP, CONFIG, GENERATION = FILES[3], "special_tokens_map.json", FILES[0], FILES[1]
NO_TOKENS = edit(
    SETTINGS, bos_token=..., eos_token=..., pad_token=..., unk_token=..., additional_special_tokens=...
)
NO_IDS = several(edit(CONFIG, eos_token_id=None), edit(GENERATION, eos_token_id=None))

TOKENIZERS: dict[str, Change] = {
    "as it is": lambda _: None,
    "tokens in the map": several(NO_TOKENS, edit(MAP, eos_token="<|im_end|>", pad_token="<|endoftext|>")),
    "tokens as objects": several(NO_TOKENS, edit(MAP, eos_token={"content": "<|im_end|>", "lstrip": False})),
    "the map comes first": edit(MAP, eos_token="<|endoftext|>"),
    "a stale map": several(
        edit(SETTINGS, added_tokens_decoder={"2": TOOL | {"content": "<|im_end|>", "special": True}}),
        edit(MAP, eos_token="<|endoftext|>"),
    ),
    "a token of the settings": edit(SETTINGS, added_tokens_decoder={"1536": TOOL | {"special": True}}),
    "a token that has text": edit(SETTINGS, added_tokens_decoder={"1536": TOOL | {"special": False}}),
    "two of them": edit(
        SETTINGS,
        added_tokens_decoder={
            "1537": TOOL | {"content": "<extra>", "special": False},
            "1536": TOOL | {"special": True},
        },
    ),
    "added_tokens.json": write("added_tokens.json", '{"<tool>": 1536, "<extra>": 1537}'),
    "added and special": several(
        write("added_tokens.json", '{"<tool>": 1536}'), edit(MAP, extra_special_tokens=["<tool>"])
    ),
    "a token of the model's own": edit(SETTINGS, image_token="<|im_start|>"),
    "extra tokens by name": edit(SETTINGS, extra_special_tokens={"image_token": "<|im_start|>"}),
    "no unknown token": edit(SETTINGS, unk_token=None),
    "an empty map": edit(MAP),
    "truncation left over": lambda folder: write(
        "tokenizer.json",
        json.dumps(
            json.loads((folder / "tokenizer.json").read_text())
            | {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}}
        ),
    )(folder),
    "vocab.json and merges.txt": several(split_vocabulary, edit(SETTINGS, tokenizer_class="GPT2Tokenizer")),
}
TEMPLATES: dict[str, Change] = {
    "in the settings": edit(SETTINGS, chat_template=SHOWS_TOKENS),
    "in a file": write("chat_template.jinja", SHOWS_TOKENS + "!"),
    "the file comes first": several(edit(SETTINGS, chat_template="no"), write("chat_template.jinja", "yes")),
    "named ones": edit(
        SETTINGS,
        chat_template=[{"name": "tool_use", "template": "no"}, {"name": "default", "template": SHOWS_TOKENS}],
    ),
    "further files": several(
        write("chat_template.jinja", SHOWS_TOKENS), write("additional_chat_templates/rag.jinja", "no")
    ),
    "with tokens of its own": edit(
        SETTINGS, extra_special_tokens={"a_token": "<|im_start|>"}, chat_template="{{ a_token }}"
    ),
    "with tokens of its model": edit(
        SETTINGS, model_specific_special_tokens={"mark": "<|im_end|>"}, chat_template="{{ mark }}"
    ),
    "with tokens of the map": several(
        NO_TOKENS,
        edit(SETTINGS, chat_template=SHOWS_TOKENS),
        edit(MAP, bos_token="<|endoftext|>", eos_token={"content": "<|im_end|>"}),
    ),
    "with a token of the model's own": edit(
        SETTINGS, boi_token="<|im_start|>", chat_template="{{ boi_token }}"
    ),
}
ENDS: dict[str, Change] = {
    "a list": edit(GENERATION, eos_token_id=[0, 2]),
    "a list of one": edit(CONFIG, eos_token_id=[2]),
    "null": several(NO_IDS),
    "only in the settings": several(NO_IDS, edit(SETTINGS, eos_token="<|im_start|>")),
    "only in the map": several(NO_IDS, NO_TOKENS, edit(MAP, eos_token="<|im_start|>")),
    "no generation settings": remove(GENERATION),
    "a float": edit(GENERATION, eos_token_id=2.0),
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0}
ROTARY: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 77.0},
    "nested": {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "nested with scaling": {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5} | LLAMA3},
    "scaling at the top": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "both": {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "scaling and parameters": {
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3,
        "rope_parameters": {"rope_theta": 3.0},
    },
    "an old name of the kind": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn without a length": {"rope_scaling": YARN},
    "yarn with a length": {"rope_scaling": YARN | {"original_max_position_embeddings": 512}},
    "null": {"rope_scaling": None},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        shutil.copy(DEMO / name, tmp_path)
    return tmp_path


def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def same_tokens(ours: Tokenizer, other: Any) -> None:
    ids = ours.encode(TEXT)
    assert ids == other.encode(TEXT)
    assert ours.decode(ids) == other.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == other.decode(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_texts_have_the_tokens_that_transformers_gives_them(folder: Path, kind: str) -> None:
    TOKENIZERS[kind](folder)
    ours, other = load_tokenizer(folder), theirs(folder)
    same_tokens(ours, other)
    assert other.eos_token_id is None or other.eos_token_id in ours.eos_ids


@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_are_rendered_as_by_transformers(folder: Path, kind: str) -> None:
    TEMPLATES[kind](folder)
    ours, other = load_tokenizer(folder), theirs(folder)
    wanted = other.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(CHAT) == list(wanted)
    assert "no" not in ours.decode(list(wanted)).split()


@pytest.mark.parametrize("kind", ENDS)
def test_all_end_tokens_that_transformers_knows_end_an_answer(folder: Path, kind: str) -> None:
    from transformers import AutoConfig, GenerationConfig

    ENDS[kind](folder)
    wanted: set[int] = set()
    for source in (AutoConfig, GenerationConfig):
        if source is AutoConfig or (folder / GENERATION).exists():
            found = source.from_pretrained(folder).eos_token_id
            wanted |= set(found if isinstance(found, list) else [found])
    wanted |= {theirs(folder).eos_token_id}
    assert load_tokenizer(folder).eos_ids == wanted - {None}


@pytest.mark.parametrize("value", ["2", 1.5, [True], {"id": 2}])
def test_end_tokens_that_are_no_ids_are_refused(folder: Path, value: Any) -> None:
    edit(CONFIG, eos_token_id=value)(folder)
    with pytest.raises(ModelLoadError, match=r"eos_token_id in .*config\.json must be a token id or a list"):
        load_tokenizer(folder)


@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_settings_are_those_of_transformers(folder: Path, kind: str) -> None:
    from transformers import AutoConfig

    edit(CONFIG, **ROTARY[kind])(folder)
    wanted = AutoConfig.from_pretrained(folder).rope_parameters
    ours = rope_settings(read_config(folder))[""]
    ignored = {"type", "partial_rotary_factor"}
    assert {k: v for k, v in ours.items() if k not in ignored} == {
        k: v for k, v in wanted.items() if k not in ignored and v is not None
    }
