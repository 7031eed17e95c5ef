from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from octavo.engine.http.app import POSTS
from octavo.engine.http.completions import CompletionRequest
from octavo.engine.http.errors import FieldError
from octavo.engine.http.request_model import LONG_BODY, MAX_DEPTH, MAX_NUMBERS, MAX_VALUES, parse

pytestmark = pytest.mark.server

MAX_ERRORS = 50  # limit for one body, because pydantic writes 1 KB per error
ITEMS = ('"a"', "1", "1.5", "[]", "{}", "null", "[1]", '{"text":"a"}')
SAMPLES: dict[str, str] = {
    "prompt": '"a"', "messages": '[{"role":"user","content":"a"}]', "input": '"a"', "query": '"a"',
    "documents": '["a"]', "max_tokens": "1", "tokens": "[97]", "lora_name": '"a"', "lora_path": '"a"',
}  # fmt: skip
ENDPOINTS = [kind for kind, _ in POSTS.values()]


def values(size: int) -> Iterator[tuple[str, str]]:
    yield "long", '"' + "a" * size + '"'
    yield "escaped", '"' + "\\u0000" * (size // 6) + '"'
    for item in ITEMS:
        yield f"many {item}", "[" + ",".join([item] * (size // (len(item) + 1))) + "]"
    yield "many keys", "{" + ",".join(f'"{at}":1' for at in range(size // 10)) + "}"
    yield "deep", "[" * (size // 2) + "]" * (size // 2)
    yield "long number", "1" * size


def bodies(kind: Any, size: int) -> Iterator[tuple[str, bytes]]:
    for name in (
        *{repr(each.annotation): name for name, each in kind.model_fields.items()}.values(),
        "unknown",
    ):
        begin = {each: SAMPLES[each] for each in kind.model_fields if each in SAMPLES and each != name}
        for what, value in values(size):
            fields = ",".join(f'"{key}":{text}' for key, text in (begin | {name: value}).items())
            yield f"{name}: {what}", b"{" + fields.encode() + b"}"


@pytest.mark.parametrize("kind", ENDPOINTS, ids=lambda kind: str(kind.__name__))
def test_wrong_list_items_are_reported_once(kind: Any) -> None:
    counts: dict[str, int] = {}
    for name, body in bodies(kind, 5000):
        try:
            kind.model_validate_json(body)
        except ValidationError as error:
            counts[name] = error.error_count()
    assert {name: n for name, n in counts.items() if n > MAX_ERRORS and "many keys" not in name} == {}


def test_wrong_values_of_an_object_are_counted() -> None:
    kind, _ = POSTS["/v1/completions"]
    biases = ",".join(f'"{at}":"x"' for at in range(300))
    with pytest.raises(FieldError, match="the body has 300 wrong values"):
        parse(kind, f'{{"prompt":"a","logit_bias":{{{biases}}}}}'.encode())


@pytest.mark.parametrize("item", ITEMS)
def test_values_of_a_long_body_are_counted_outside_of_text(item: str) -> None:
    kind, _ = POSTS["/v1/completions"]
    text = '"' + '[{\\"' * MAX_VALUES + '"'
    assert parse(kind, f'{{"prompt":{text},"max_tokens":1}}'.encode()).prompt.startswith('[{"')
    many = ",".join([item] * (MAX_VALUES + 1))
    body = f'{{"prompt":{text},"stop":[{many}]}}'.encode()
    found = "stop must be" if item in ("1", "1.5") else f"at most {MAX_VALUES} strings, objects and lists"
    with pytest.raises(FieldError, match=found):
        parse(kind, body)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/detokenize"])
def test_numbers_of_a_long_body_are_counted_before_any_is_made(path: str) -> None:
    kind, _ = POSTS[path]
    field = {"/v1/completions": "prompt", "/v1/embeddings": "input"}.get(path, "tokens")
    most = f'{{"{field}":[{",".join(["7"] * MAX_NUMBERS)}]}}'.encode()
    assert len(getattr(parse(kind, most), field)) == MAX_NUMBERS
    with pytest.raises(FieldError, match=f"at most {MAX_NUMBERS} numbers, got at least {MAX_NUMBERS + 1}"):
        parse(kind, most.replace(b"[7", b"[7,7,7"))


def test_ids_of_a_long_body_take_little_memory_while_parsed() -> None:
    code = """
import resource
from octavo.engine.http.completions import CompletionRequest
from octavo.engine.http.request_model import parse
body = b'{"prompt": [' + b"1," * 260_000 + b'1], "max_tokens": 1}'
parse(CompletionRequest, b'{"prompt": [1]}')
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
parse(CompletionRequest, body)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / len(body))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 20  # pydantic's parser takes 40 bytes per byte


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_long_body_may_not_be_nested_deeply(opening: bytes) -> None:
    body = b'{"prompt": "a", "x": ' + opening * (MAX_DEPTH + 1) + b" " * LONG_BODY
    with pytest.raises(FieldError, match=f"nested more than {MAX_DEPTH} deep"):
        parse(CompletionRequest, body)
