from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..api.errors import InvalidRequest
from ..api.sampling_params import SamplingParams
from ..api.structured_output import StructuredOutput
from .answer import AnswerReader
from .call_grammar import ToolFormat, call_grammar
from .call_writer import Tools
from .chat_format import ChatFormat
from .harmony import HarmonyCalls
from .tool_formats import tool_format

MAX_TOOLS = 512
_NAME = re.compile(r"[\w.:/-]{1,128}")
_FORCED_FORMAT = "json_tools"  # for models without a known tool call format


class ChatTokenizer(Protocol):
    @property
    def chat_format(self) -> ChatFormat: ...

    @property
    def shows_tools(self) -> bool: ...

    def added_id(self, text: str) -> int | None: ...

    def prompt_tail(self, prompt_ids: Sequence[int]) -> str:
        """Return the text of the last prompt tokens, including special tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Effects of a request's tools on its prompt and output."""

    shown: Tools = ()
    structured: StructuredOutput | None = None
    is_complete: bool = False
    form: ToolFormat | None = None
    max_calls: int | None = None

    def applied(self, params: SamplingParams) -> SamplingParams:
        from_first = self.is_complete or params.structured_from_first_token
        return replace(params, structured=self.structured, structured_from_first_token=from_first)

    def reader(self, tokenizer: ChatTokenizer, prompt_ids: Sequence[int] | None) -> AnswerReader:
        reasoning = tokenizer.chat_format.reasoning
        is_thinking = False
        if reasoning is not None:
            tail = "" if prompt_ids is None else tokenizer.prompt_tail(prompt_ids)
            is_thinking = reasoning.is_open(tail)
            if prompt_ids is None or reasoning.is_closed(tail):
                reasoning = None
        return AnswerReader(
            reasoning=reasoning,
            is_thinking=is_thinking,
            tool_format=self.form,
            tools=self.shown,
            max_calls=self.max_calls,
        )


def tool_use(
    tokenizer: ChatTokenizer,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None = None,
    params: SamplingParams | None = None,
    *,
    is_parallel: bool = True,
) -> ToolUse:
    """Validate the tools and return their effects. Raises InvalidRequest for invalid combinations."""
    params = params or SamplingParams()
    structured = params.structured
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(
                f"tool_choice must come with tools, got {choice!r:.80} without any; give tools, or leave "
                "it out"
            )
        return ToolUse(structured=structured)
    _check_tools(tools)
    named = _named(tools, choice)
    if choice == "none":
        return ToolUse(structured=structured)
    is_forced = choice == "required" or named is not None
    form = tokenizer.chat_format.tools
    if form is None and is_forced:
        form = tool_format(_FORCED_FORMAT)
    if form is None or not (tokenizer.shows_tools or is_forced):
        raise InvalidRequest(
            "tools must be left out for this model: its chat template "
            + (
                "uses an unknown notation for tool calls"
                if tokenizer.shows_tools
                else "does not show tools to the model"
            )
            + "; start the server with --chat-template or --tool-call-parser, or set tool_choice to required"
        )
    callable_tools, max_calls = named or list(tools), None if is_parallel else 1
    use = ToolUse(shown=list(tools), form=form, max_calls=max_calls)
    if not _needs_grammar(callable_tools, structured, is_forced=is_forced):
        return use
    schema = None if structured is None or is_forced else _schema_of(structured)
    if isinstance(form, HarmonyCalls):
        whole = form.whole_grammar(
            callable_tools, added_id=tokenizer.added_id, is_forced=is_forced, or_schema=schema
        )
        if whole is not None and params.max_reasoning_tokens is None:
            return replace(use, structured=StructuredOutput(grammar=whole), is_complete=True)
        form = tool_format(_FORCED_FORMAT)
        assert form is not None
    source = call_grammar(
        form.shape,
        callable_tools,
        start="" if form.is_bare else form.start,
        marks=form.marks,
        added_id=tokenizer.added_id,
        is_many=is_parallel,
        with_text=not is_forced and schema is None,
        or_schema=schema,
    )
    return replace(use, structured=StructuredOutput(grammar=source), form=form)


def _needs_grammar(tools: Tools, structured: StructuredOutput | None, *, is_forced: bool) -> bool:
    is_strict = any(tool["function"].get("strict") is True for tool in tools)
    return is_forced or is_strict or structured is not None


def _schema_of(structured: StructuredOutput) -> Any:
    if structured.kind not in ("json_schema", "json_object"):
        raise InvalidRequest(
            f"{structured.kind} must not come with tools whose calls are optional; give a JSON "
            "schema, or set tool_choice to required or none"
        )
    return {"type": "object"} if structured.json_object else json.loads(structured.source)


def _check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be at most {MAX_TOOLS}, got {len(tools)}; leave some out")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if (
            not isinstance(tool, Mapping)
            or tool.get("type") != "function"
            or not isinstance(function, Mapping)
        ):
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise InvalidRequest(
                f'{where} must be of type "function" and have a function, got {kind!r:.60}; other '
                "tools are not served here"
            )
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{where}.function.name must be 1 to 128 letters, digits or _.:/-, got {name!r:.140}; "
                "rename it"
            )
        if name in names:
            raise InvalidRequest(
                f"{where}.function.name must differ from the names of the other tools, got {name!r}; "
                "rename it"
            )
        names.add(name)
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidRequest(
                f"{where}.function.parameters must be a JSON schema of an object, got {parameters!r:.60}; "
                "correct it, or leave it out"
            )
        _check_keys(f"{where}.function", function, {"name", "description", "parameters", "strict"})
        _check_keys(where, tool, {"type", "function"})


def _check_keys(where: str, given: Mapping[str, Any], known: Set[str]) -> None:
    for key in given.keys() - known:
        raise InvalidRequest(f"{where}.{key} is not served here; leave it out")


def _named(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None
) -> list[Mapping[str, Any]] | None:
    if choice is None or choice in ("none", "auto", "required"):
        return None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if (
        not isinstance(choice, Mapping)
        or choice.get("type") != "function"
        or not isinstance(function, Mapping)
    ):
        raise InvalidRequest(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": '
            f"...}}}}, got {choice!r:.80}; leave it out for auto"
        )
    _check_keys("tool_choice", choice, {"type", "function"})
    _check_keys("tool_choice.function", function, {"name"})
    found = [tool for tool in tools if tool["function"]["name"] == function.get("name")]
    if not found:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise InvalidRequest(
            f"tool_choice names {function.get('name')!r:.80}, which must be one of the tools ({names:.200}); "
            "correct it"
        )
    return found
