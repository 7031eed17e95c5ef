from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from ..api.errors import InvalidConfig
from .call_grammar import CallShape, Parameters, ToolFormat
from .call_writer import Tools
from .harmony import HarmonyCalls
from .json_calls import HeadedCalls, JsonCalls
from .tag_calls import GemmaCalls, Parse, TagCalls, WholeCalls

ALIASES: Mapping[str, str] = {
    "hermes": "json_tools", "qwen": "json_tools", "qwen25": "json_tools", "json": "json_tools",
    "granite": "json_tools", "qwen3_xml": "qwen3_coder", "qwen_coder": "qwen3_coder", "qwen35": "qwen3_coder",
    "glm45": "glm47", "glm4_moe": "glm47", "glm45_moe": "glm47", "glm47_moe": "glm47", "laguna": "glm47",
    "llama": "llama3_json", "llama3": "llama3_json", "llama4_json": "llama3_json",
    "deepseek": "deepseek_v3", "deepseek_v31": "deepseek_v3", "deepseek31": "deepseek_v3",
    "kimik2": "kimi_k2", "minimax": "minimax_m2", "gemma": "gemma4", "functiongemma": "function_gemma",
    "lfm2": "pythonic", "gpt_oss": "harmony", "openai": "harmony",
}  # fmt: skip


def _mlx_parser(name: str) -> Parse:

    @functools.cache
    def module() -> Parse:
        return cast("Parse", importlib.import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call)

    def parse(text: str, tools: Tools) -> Any:
        return module()(text, tools)

    return parse


def _kimi_name(head: str) -> tuple[str, str | None]:
    found = re.fullmatch(r"(?:functions\.)?(.+?):\d+", head.strip())
    return (found.group(1), head.strip()) if found else (head.strip(), None)


def _mistral_name(head: str) -> tuple[str, str | None]:
    name, _, call_id = head.partition("[CALL_ID]")
    return name.strip(), call_id.strip() or None


def _deepseek_name(head: str) -> tuple[str, str | None]:
    return ("" if head.strip() == "function" else head.strip()), None


def _tags(name: str, start: str, **parts: object) -> Callable[[], ToolFormat]:
    return lambda: TagCalls(parse=_mlx_parser(name), start=start, **parts)  # type: ignore[arg-type]


_MAKERS: Mapping[str, Callable[[], ToolFormat]] = {
    "harmony": HarmonyCalls,
    "json_tools": lambda: JsonCalls(
        start="<tool_call>", end="</tool_call>",
        shape=CallShape(
            call=('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>"), between="\n"
        ),
    ),
    "llama3_json": lambda: JsonCalls(
        start="<|python_tag|>", end="", is_bare=True, between=";",
        shape=CallShape(call=('{"name": "{name}", "parameters": ', "}"), between="; "),
    ),
    "mistral": lambda: HeadedCalls(
        start="[TOOL_CALLS]", end="", call_start="", call_end="", separators=("[ARGS]",),
        name_of=_mistral_name, takes_list=True, id_style="short",
        shape=CallShape(call=("[TOOL_CALLS]{name}[ARGS]", "")),
    ),
    "kimi_k2": lambda: HeadedCalls(
        start="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>",
        call_start="<|tool_call_begin|>", call_end="<|tool_call_end|>",
        separators=("<|tool_call_argument_begin|>",), name_of=_kimi_name,
        shape=CallShape(
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            call=(
                "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>", "<|tool_call_end|>"
            ),
        ),
    ),
    "deepseek_v3": lambda: HeadedCalls(
        start="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>",
        call_start="<｜tool▁call▁begin｜>", call_end="<｜tool▁call▁end｜>",
        separators=("<｜tool▁sep｜>",), name_of=_deepseek_name, fence=("```json", "```"),
        shape=CallShape(
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            call=("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ),
    ),
    "qwen3_coder": _tags(
        "qwen3_coder", "<tool_call>", end="</tool_call>", call=("<function=", ">"), key=("<parameter=", ">"),
        value=("", "</parameter>"), call_end="</function>", trim="line", null_word=True,
        shape=CallShape(
            call=("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"), between="\n",
            parameters=Parameters(before="<parameter={key}>\n", after="\n</parameter>\n"),
        ),
    ),
    "glm47": _tags(
        "glm47", "<tool_call>", end="</tool_call>", call=None, key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"), call_end="</tool_call>", trim="space", null_word=False,
        shape=CallShape(
            call=("<tool_call>{name}\n", "</tool_call>"), between="\n",
            parameters=Parameters(before="<arg_key>{key}</arg_key>\n<arg_value>", after="</arg_value>\n"),
        ),
    ),
    "longcat": _tags(
        "longcat", "<longcat_tool_call>", end="</longcat_tool_call>", call=None,
        key=("<longcat_arg_key>", "</longcat_arg_key>"),
        value=("<longcat_arg_value>", "</longcat_arg_value>"), call_end="</longcat_tool_call>",
        trim="space", null_word=False,
        shape=CallShape(
            call=("<longcat_tool_call>{name}\n", "</longcat_tool_call>"), between="\n",
            parameters=Parameters(
                before="<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>",
                after="</longcat_arg_value>\n",
            ),
        ),
    ),
    "minimax_m2": _tags(
        "minimax_m2", "<minimax:tool_call>", end="</minimax:tool_call>", call=("<invoke name=", ">"),
        key=("<parameter name=", ">"), value=("", "</parameter>"), call_end="</invoke>", trim="space",
        null_word=True,
        shape=CallShape(
            section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
            call=('<invoke name="{name}">\n', "</invoke>\n"),
            parameters=Parameters(before='<parameter name="{key}">', after="</parameter>\n"),
        ),
    ),
    "minicpm5": _tags(
        "minicpm5", "<function name=", end="", call=("<function name=", ">"), key=("<param name=", ">"),
        value=("", "</param>"), call_end="</function>", trim="space", null_word=True,
        shape=CallShape(
            call=('<function name="{name}">', "</function>"), between="\n",
            parameters=Parameters(before='<param name="{key}">', after="</param>"),
        ),
    ),
    "gemma4": lambda: GemmaCalls(
        parse=_mlx_parser("gemma4"), start="<|tool_call>", end="<tool_call|>", quote='<|"|>',
        shape=CallShape(
            call=("<|tool_call>call:{name}{", "}<tool_call|>"),
            parameters=Parameters(before="{key}:", after="", between=",", texts='<|"|>', nested="bare"),
        ),
    ),
    "function_gemma": lambda: WholeCalls(
        parse=_mlx_parser("function_gemma"), start="<start_function_call>", end="<end_function_call>",
        inner_marks=("<escape>",),
        shape=CallShape(
            call=("<start_function_call>call:{name}{", "}<end_function_call>"),
            parameters=Parameters(before="{key}:", after="", between=",", texts="<escape>"),
        ),
    ),
    "pythonic": lambda: WholeCalls(
        parse=_mlx_parser("pythonic"), start="<|tool_call_start|>", end="<|tool_call_end|>",
        shape=CallShape(
            section=("<|tool_call_start|>[", "]<|tool_call_end|>"), call=("{name}(", ")"), between=", ",
            parameters=Parameters(before="{key}=", after="", between=", ", texts="json"),
        ),
    ),
    "muse_spark": lambda: WholeCalls(
        parse=_mlx_parser("muse_spark"), start="<atem:function_calls>", end="</atem:function_calls>",
        shape=CallShape(
            section=("<atem:function_calls>\n", "</atem:function_calls>"),
            call=('<atem:invoke name="{name}">\n', "</atem:invoke>\n"),
            parameters=Parameters(
                before='<atem:parameter name="{key}">', after="</atem:parameter>\n", texts="json"
            ),
        ),
    ),
    "kimi_k3": lambda: WholeCalls(
        parse=_mlx_parser("kimi_k3"), start="<|open|>tools<|sep|>", end="<|close|>tools<|sep|>",
        inner_marks=("<|open|>", "<|close|>", "<|sep|>"),
        shape=CallShape(
            section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            call=(
                '<|open|>call tool="{name}" index="{index}"<|sep|><|open|>json type="object"<|sep|>',
                "<|close|>json<|sep|><|close|>call<|sep|>",
            ),
        ),
    ),
}  # fmt: skip

TOOL_PARSERS: tuple[str, ...] = tuple(sorted(_MAKERS))

# Texts that a chat template must contain, and the parser to use.
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>commentary", "functions."), "harmony"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<start_function_call>",), "function_gemma"),
    (("<longcat_tool_call>",), "longcat"),
    (("<arg_key>",), "glm47"),
    (("<|tool_list_start|>",), "pythonic"),
    (("<|tool_call_start|>",), "pythonic"),
    (("<tool_call>\\n<function=",), "qwen3_coder"),
    (("<tool_call>\n<function=",), "qwen3_coder"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<atem:function_calls>",), "muse_spark"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v3"),
    (("<|open|>", "<|sep|>", "tool="), "kimi_k3"),
    (("<tool_call>",), "json_tools"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
)


def tool_format(name: str) -> ToolFormat | None:
    """Return the named notation; None for "none". Raises InvalidConfig for an unknown name."""
    if name in ("none", "off"):
        return None
    maker = _MAKERS.get(ALIASES.get(name, name))
    if maker is None:
        raise InvalidConfig(
            f"tool_call_parser must be one of auto, none, {', '.join(TOOL_PARSERS)}, got {name!r}; "
            "auto detects it from the chat template"
        )
    return maker()


def tool_format_of(template: str) -> ToolFormat | None:
    """Detect the notation of a chat template; None if the template has no tools."""
    for signs, name in _SIGNS:
        if all(sign in template for sign in signs):
            return tool_format(name)
    return None
