from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.chat.answer import AnswerReader
from octavo.engine.chat.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallMalformed,
    ContentText,
    Event,
    ReasoningText,
)
from octavo.engine.chat.reasoning import Reasoning
from octavo.engine.chat.tool_formats import tool_format


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [
    tool(
        "write_file",
        path={"type": "string"},
        text={"type": "string"},
        mode={"type": "integer"},
        options={"type": "object"},
    ),
    tool("now"),
]
ARGUMENTS = {
    "path": "a b/<c>.py",
    "text": 'x = "1"\nif x < 2 & y:\n\treturn {"ü": [1]}',
    "mode": 420,
    "options": {"deep": [True, None, {"k": "v"}]},
}
CALLS = [("write_file", ARGUMENTS), ("now", {})]
_TEXT = ARGUMENTS["text"]
_JSON = (
    '{"path": "a b/<c>.py", "text": "x = \\"1\\"\\nif x < 2 & y:\\n\\treturn {\\"ü\\": [1]}", "mode": 420, '
    '"options": {"deep": [true, null, {"k": "v"}]}}'
)
_OPTIONS = '{"deep": [true, null, {"k": "v"}]}'

# By parser: two calls in the format of the model family.
WRITTEN = {
    "json_tools": f'<tool_call>\n{{"name": "write_file", "arguments": {_JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>',
    "llama3_json": f'{{"name": "write_file", "parameters": {_JSON}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f"[TOOL_CALLS]write_file[ARGS]{_JSON}[TOOL_CALLS]now[CALL_ID]abc123DEF[ARGS]{{}}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write_file:0"
    f"<|tool_call_argument_begin|>{_JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write_file\n```json\n"
    f"{_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "qwen3_coder": "<tool_call>\n<function=write_file>\n<parameter=path>\na b/<c>.py\n</parameter>\n"
    f"<parameter=text>\n{_TEXT}\n</parameter>\n<parameter=mode>\n420\n</parameter>\n"
    f"<parameter=options>\n{_OPTIONS}\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm47": "<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>a b/<c>.py</arg_value>\n"
    f"<arg_key>text</arg_key>\n<arg_value>{_TEXT}</arg_value>\n<arg_key>mode</arg_key>\n"
    f"<arg_value>420</arg_value>\n<arg_key>options</arg_key>\n<arg_value>{_OPTIONS}</arg_value>\n</tool_call>\n"
    "<tool_call>now\n</tool_call>",
    "longcat": "<longcat_tool_call>write_file\n<longcat_arg_key>path</longcat_arg_key>\n"
    "<longcat_arg_value>a b/<c>.py</longcat_arg_value>\n<longcat_arg_key>text</longcat_arg_key>\n"
    f"<longcat_arg_value>{_TEXT}</longcat_arg_value>\n<longcat_arg_key>mode</longcat_arg_key>\n"
    "<longcat_arg_value>420</longcat_arg_value>\n<longcat_arg_key>options</longcat_arg_key>\n"
    f"<longcat_arg_value>{_OPTIONS}</longcat_arg_value>\n</longcat_tool_call>\n"
    "<longcat_tool_call>now\n</longcat_tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="write_file">\n<parameter name="path">a b/<c>.py'
    f'</parameter>\n<parameter name="text">{_TEXT}</parameter>\n<parameter name="mode">420</parameter>\n'
    f'<parameter name="options">{_OPTIONS}</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
    "</minimax:tool_call>",
    "minicpm5": '<function name="write_file"><param name="path"><![CDATA[a b/<c>.py]]></param>'
    f'<param name="text"><![CDATA[{_TEXT}]]></param><param name="mode">420</param>'
    f'<param name="options">{_OPTIONS}</param></function>\n<function name="now"></function>',
    "gemma4": '<|tool_call>call:write_file{path:<|"|>a b/<c>.py<|"|>,text:<|"|>'
    f'{_TEXT}<|"|>,mode:420,options:{{deep:[true,null,{{k:<|"|>v<|"|>}}]}}}}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
    "pythonic": "<|tool_call_start|>[write_file(path='a b/<c>.py', text="
    f'{_TEXT!r}, mode=420, options={{"deep": [true, null, {{"k": "v"}}]}}), now()]<|tool_call_end|>',
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="write_file">\n'
    '<atem:parameter name="path">a b/<c>.py</atem:parameter>\n'
    f'<atem:parameter name="text">{_TEXT}</atem:parameter>\n'
    '<atem:parameter name="mode">420</atem:parameter>\n'
    f'<atem:parameter name="options">{_OPTIONS}</atem:parameter>\n</atem:invoke>\n'
    '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="write_file" index="1"<|sep|>'
    f'<|open|>json type="object"<|sep|>{_JSON}<|close|>json<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
}
STREAMED = sorted(WRITTEN.keys() - {"pythonic", "muse_spark", "kimi_k3"})


@dataclass(slots=True)
class Call:
    name: str
    call_id: str
    arguments: str = ""
    is_complete: bool = False


@dataclass(slots=True)
class Answer:
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    malformed: str = ""
    shown: str = ""

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ReasoningText(text):
                    self.reasoning += text
                case ContentText(text):
                    self.content += text
                    self.shown += text
                case CallBegin(index, call_id, name):
                    assert index == len(self.calls)
                    self.calls.append(Call(name, call_id))
                case CallArguments(index, text):
                    assert index == len(self.calls) - 1
                    self.calls[index].arguments += text
                case CallEnd(index):
                    self.calls[index].is_complete = True
                case CallMalformed(text, _):
                    self.malformed += text
                    self.shown += text


def reader(
    parser: str | None, reasoning: Reasoning | None = None, *, is_thinking: bool = False
) -> AnswerReader:
    form = None if parser is None else tool_format(parser)
    return AnswerReader(reasoning=reasoning, is_thinking=is_thinking, tool_format=form, tools=TOOLS)


def read(made: AnswerReader, pieces: Sequence[str], *, was_cut: bool = False) -> Answer:
    answer = Answer()
    for piece in pieces:
        answer.add(made.add(piece))
    answer.add(made.finish(was_cut=was_cut))
    return answer
