from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from octavo.block_manager import MediaSpan

from .errors import InvalidRequest
from .image import ImageTensors, PromptImage

RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
)
Message: TypeAlias = Mapping[str, Any]  # {"role": ..., "content": ...}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Chat messages and other inputs of the chat template.

    tools                   functions that the model may call, in OpenAI's format
    variables               further template variables, such as enable_thinking
    open_turn               end the prompt with the start of the assistant's turn
    continue_final_message  end the prompt inside the last message, so the model continues it
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = field(default=None, kw_only=True)
    variables: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    open_turn: bool = field(default=True, kw_only=True)
    continue_final_message: bool = field(default=False, kw_only=True)
    has_images: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_variables("chat_template_kwargs", self.variables)


def check_variables(field: str, variables: Mapping[str, Any]) -> None:
    for name in RESERVED:
        if variables.get(name) is not None:
            raise InvalidRequest(f"{field}.{name} must be left out: it is not a variable of the template")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    ids: list[int]
    images: tuple[PromptImage, ...] = ()

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        return tuple(image.span for image in self.images)


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Token ids and images, as routers send them."""

    ids: Sequence[int]
    urls: Sequence[str] = ()
    tensors: ImageTensors | None = None


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | ChatPrompt | ImagePrompt | EncodedPrompt
"""Text (encoded as a document), token ids, or chat messages."""
