from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import octavo.engine
from fakes import byte_tokenizer
from octavo.engine.api.errors import InvalidRequest, ModelLoadError
from octavo.engine.api.prompt import ChatPrompt
from octavo.engine.tokenizer.chat_template import ChatTemplate
from octavo.engine.tokenizer.tokenizer import load_tokenizer

DEMO = Path(octavo.engine.__file__).parent / "demo"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / file, tmp_path)
    return tmp_path


def test_the_demo_tokenizer_reads_and_writes() -> None:
    tokenizer = load_tokenizer(DEMO)
    ids = tokenizer.encode("Hello, 漢字 😀")
    assert tokenizer.decode(ids) == "Hello, 漢字 😀"
    assert tokenizer.vocab_size == 1536
    assert tokenizer.eos_ids == {0, 2}


def test_chat_is_rendered_as_transformers_does_it() -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>&</b>"}]
    theirs = AutoTokenizer.from_pretrained(DEMO).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert load_tokenizer(DEMO).apply_chat_template(messages) == list(theirs)


def test_templates_may_use_documented_functions() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}\n"
        "  {% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
        "{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%%') }}",
        {"bos_token": "<s>"},
    )
    message = {"role": "user", "content": "é<"}
    assert template.render(ChatPrompt([message])) == '<s>{"role": "user", "content": "é<"}%'
    with pytest.raises(InvalidRequest, match="no tools"):
        template.render(ChatPrompt([{"role": "tool", "content": "x"}]))


def test_templates_run_in_a_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", {})
    with pytest.raises(InvalidRequest, match="template refuses"):
        template.render(ChatPrompt([{"role": "user", "content": "x"}]))


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], ["hello"], [{"content": "x"}]])
def test_messages_need_a_role_and_a_content(messages: list[dict[str, str]]) -> None:
    with pytest.raises(InvalidRequest, match="message"):
        byte_tokenizer().apply_chat_template(messages)


def test_a_template_in_a_file_of_its_own_comes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("Q: {{ messages[0].content }}\nA:")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "x"}])) == "Q: x\nA:"


def test_of_several_templates_the_default_is_used(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "x"}])) == "yes"


def test_without_a_template_messages_are_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(folder)
    with pytest.raises(InvalidRequest, match="no chat template; send a plain prompt"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "not json"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("generation_config.json", "\udcff"),
    ],
)
def test_broken_files_are_named_in_one_line(folder: Path, file: str, content: str | None) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
    assert "tokenizer" in str(caught.value) or file in str(caught.value) or "template" in str(caught.value)


def test_truncation_settings_of_training_are_ignored(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(load_tokenizer(folder).encode("one two three four five six seven")) > 4


def test_reading_a_tokenizer_imports_neither_mlx_nor_transformers() -> None:
    code = (
        "import sys, pathlib; from octavo.engine.tokenizer.tokenizer import load_tokenizer\n"
        f"load_tokenizer(pathlib.Path({str(DEMO)!r}))\n"
        "print([name for name in ('mlx', 'mlx_lm', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
