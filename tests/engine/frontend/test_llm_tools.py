from __future__ import annotations

import json
from typing import Any

import pytest

from fakes import FakeCore, byte_tokenizer, small_config
from octavo.engine import LLM, FinishReason, InvalidRequest, SamplingParams, StructuredOutput
from scripted import PLAIN_TEMPLATE, TEMPLATE

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {**SCHEMA, "additionalProperties": False}},
}
PARAMS = SamplingParams(max_tokens=400, max_reasoning_tokens=9, temperature=1, seed=3)
USER = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]


def made(template: str = TEMPLATE) -> LLM:
    return LLM(
        small_config(num_pages=512), core_factory=FakeCore(tokenizer=byte_tokenizer(template=template))
    )


def test_a_forced_call_comes_after_the_reasoning() -> None:
    with made() as llm:
        [output] = llm.chat(USER, PARAMS, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    [sample] = output.outputs
    assert sample.finish_reason is FinishReason.STOP
    answer = sample.answer
    assert answer is not None
    [call] = answer.tool_calls
    assert (call.name, call.is_complete) == ("f", True)
    assert json.loads(call.arguments)["a"] in (1, 2)
    assert answer.content == ""
    assert sample.text.partition("</think>")[2].startswith("<tool_call>")


def test_a_schema_begins_after_the_reasoning_or_with_the_first_token() -> None:
    for variables, thinks in (({}, True), ({"enable_thinking": False}, False)):
        structured = StructuredOutput(json_schema={**SCHEMA, "additionalProperties": False})
        params = SamplingParams(max_tokens=400, max_reasoning_tokens=9, structured=structured)
        with made() as llm:
            [output] = llm.chat(USER, params, chat_template_kwargs=variables)
        [sample] = output.outputs
        assert sample.answer is not None
        assert json.loads(sample.answer.content)["a"] in (1, 2)
        assert ("</think>" in sample.text) is thinks


def test_parts_of_text_are_one_text_and_other_parts_are_refused() -> None:
    with made(PLAIN_TEMPLATE) as llm:
        [output] = llm.chat(USER, SamplingParams(max_tokens=2))
        assert output.prompt_tokens == len("<user>Hi\n<assistant>")
        with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
            llm.chat(USER, chat_template_kwargs={"messages": USER})
        image: list[Any] = [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]
        with pytest.raises(InvalidRequest, match=r'content part 0 of message 0 must be of type "text"'):
            llm.chat(image, SamplingParams(max_tokens=2))


def test_a_budget_of_reasoning_needs_a_model_that_thinks() -> None:
    with made(PLAIN_TEMPLATE) as llm, pytest.raises(InvalidRequest, match="max_reasoning_tokens is 9"):
        llm.chat(USER, PARAMS)
