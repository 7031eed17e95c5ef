"""Chat templates, which turn a conversation into one text.

Templates are Jinja2 programs from the model's folder, so they run in a sandbox.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from ..api.errors import InvalidRequest, ModelLoadError
from ..api.prompt import ChatPrompt, Message
from .folder_files import read_json, special_tokens

log = logging.getLogger(__name__)

_ASKS_FOR_NONE = re.compile(r"(?<!\w)content['\"]?\]? (?:is not|is|==|!=) [nN]one")
_CONTINUE_HERE = "\ufdd0 "


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"the model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self._takes_none = _ASKS_FOR_NONE.search(source) is not None

    def render(self, chat: ChatPrompt) -> str:
        """Return the conversation as text. Raises InvalidRequest if the template rejects it."""
        if not chat.messages:
            raise InvalidRequest("messages is empty; give at least one message")
        messages = [
            _for_template(index, message, has_images=chat.has_images, takes_none=self._takes_none)
            for index, message in enumerate(chat.messages)
        ]
        if "message.thinking" in self.source:
            messages = list(map(_with_thinking, messages))
        names = {"tools": None, "documents": None, **self._special_tokens, **chat.variables}
        if chat.tools:
            names["tools"] = list(chat.tools)
        if chat.continue_final_message:
            messages[-1] = _marked(messages[-1])
        names |= {"messages": messages, "add_generation_prompt": chat.open_turn}
        try:
            try:
                text = self._template.render(names)
            except TypeError:
                text = self._template.render({**names, "messages": list(map(_with_texts, messages))})
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error
        except TypeError as error:
            raise InvalidRequest(f"the model's chat template cannot use these messages: {error}") from error
        return _until_mark(text, messages[-1]["content"]) if chat.continue_final_message else text


def _for_template(index: int, message: object, *, has_images: bool, takes_none: bool) -> dict[str, Any]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or "role" not in message or ("content" not in message and not calls):
        raise InvalidRequest(f"message {index} must have a role and a content, got {message!r}")
    content = message.get("content")
    if not (has_images and isinstance(content, list) and {"type": "image"} in content):
        content = _one_text(index, content)
    found = {**message, "content": content}
    found.pop("tool_calls", None)
    if calls:
        found["tool_calls"] = [_with_arguments(call, _loaded) for call in calls]
        found["content"] = content or (None if takes_none else "")
    return found


def _one_text(index: int, content: object) -> object:
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        return content
    for place, part in enumerate(content):
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise InvalidRequest(
                f'content part {place} of message {index} must be of type "text" with a text, got '
                f"{kind!r:.60}; "
                "this model reads only text"
            )
    return "".join(part["text"] for part in content)


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    reasoning, content = message.get("reasoning_content"), message["content"]
    if not reasoning:
        return message
    if content and message.get("tool_calls"):
        reasoning, content = f"{reasoning}\n\n{content}", ""
    return {**message, "thinking": reasoning, "content": content}


def _with_texts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    calls = [_with_arguments(call, _dumped) for call in calls]
    return {**message, "content": message["content"] or "", "tool_calls": calls}


def _with_arguments(call: Any, change: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}


def _loaded(arguments: Any) -> Any:
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        loaded = json.loads(arguments)
    except ValueError:
        return arguments
    return loaded if isinstance(loaded, dict) else arguments


def _dumped(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _marked(message: Message) -> dict[str, Any]:
    said = message["content"]
    return {**message, "content": said + _CONTINUE_HERE if isinstance(said, str) else said}


def _until_mark(text: str, marked: object) -> str:
    said = marked.removesuffix(_CONTINUE_HERE) if isinstance(marked, str) else None
    text, mark, rest = text.rpartition(_CONTINUE_HERE[0])
    if said is None or not mark or said.strip() not in text:
        raise InvalidRequest(
            "continue_final_message needs a last message whose text the chat template prints unchanged; give "
            "the message a text, or leave continue_final_message out"
        )
    is_trimmed = said.strip() and not rest.startswith(_CONTINUE_HERE[1])
    return text.removesuffix(said[len(said.rstrip()) :]) if is_trimmed else text


class _Generation(jinja2.ext.Extension):
    """Ignores ``{% generation %}`` in templates; it marks text for training."""

    tags = {"generation"}  # noqa: RUF012 - how Jinja2 wants it declared

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def load_chat_template(
    path: Path, settings: Mapping[str, Any], instead: Path | None = None
) -> ChatTemplate | None:
    """Return the template of a model folder, or None. The file ``instead`` replaces it."""
    if instead is not None:
        source: object = read_chat_template(instead)
    else:
        source = _source_in(path, settings)
    return ChatTemplate(source, special_tokens(settings)) if isinstance(source, str) else None


def _source_in(path: Path, settings: Mapping[str, Any]) -> object:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = settings.get("chat_template") or read_json(path / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
    if not isinstance(source, dict):
        return source
    if "default" not in source and source:
        log.warning(
            "%s has chat templates named %s and none named default; choose one of them with --chat-template",
            path, ", ".join(map(str, source)),
        )  # fmt: skip
    return source.get("default")


def read_chat_template(path: Path) -> str:
    """Return the text of a template file. Raises ModelLoadError if it is unreadable."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"chat_template {path} cannot be read: {error}; give a Jinja file") from error
    if not source.strip():
        raise ModelLoadError(f"chat_template {path} is empty; give a Jinja file, or leave it out")
    return source


def _tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
