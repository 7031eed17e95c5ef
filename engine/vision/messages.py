"""Pictures in chat messages, and their places among the tokens of the prompt."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..api.errors import InvalidRequest
from ..api.image import ImageRules, ImageTensors, PromptImage
from ..api.prompt import ChatPrompt, EncodedPrompt, Message
from .reader import MAX_IMAGES

_KINDS = ("image", "image_url")
_IN_MEMORY = (bytes, bytearray, memoryview, str)


def pictures_in(messages: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the content parts that are pictures."""
    return (part for message in messages for part in _parts(message) if is_picture(part))


def has_pictures(messages: Sequence[Any]) -> bool:
    return any(True for _ in pictures_in(messages))


def num_bytes_of(part: Mapping[str, Any]) -> int:
    """Return the size of a picture in bytes or characters; 0 for a path or a Pillow image."""
    given = _given(part)
    if isinstance(given, ImageTensors):
        return len(given.pixels.values)
    return len(given) if isinstance(given, _IN_MEMORY) else 0


def take_pictures(chat: ChatPrompt, *, max_bytes: int) -> tuple[ChatPrompt, list[bytes | ImageTensors]]:
    """Return the chat with image placeholders, and its pictures in order. Raises InvalidRequest."""
    pictures: list[bytes | ImageTensors] = []
    messages: list[Message] = []
    for message in chat.messages:
        parts = _parts(message)
        found = [_taken(part, max_bytes) for part in parts if is_picture(part)]
        content = [{"type": "image"} if is_picture(part) else _text(part) for part in parts]
        messages.append({**message, "content": content} if found else message)
        pictures += found
        if len(pictures) > MAX_IMAGES:
            raise InvalidRequest(f"a prompt must have at most {MAX_IMAGES} images, got more; leave some out")
    return replace(chat, messages=messages, has_images=True), pictures


def set_images(ids: Sequence[int], images: Sequence[PromptImage], rules: ImageRules) -> EncodedPrompt:
    """Return the prompt with a placeholder token for each row of its images."""
    if (count := ids.count(rules.token)) != len(images):
        raise InvalidRequest(
            f"a prompt must have one {rules.mark} for each of its {len(images)} images, got {count}; leave "
            f"{rules.mark} out of texts, and use a chat template that writes it"
        )
    expanded: list[int] = []
    placed: list[PromptImage] = []
    for token in ids:
        if token != rules.token:
            expanded.append(token)
            continue
        placed.append(images[len(placed)]._replace(start=len(expanded)))
        expanded += tokens_of(placed[-1], rules)
    return EncodedPrompt(expanded, tuple(placed))


def tokens_of(image: PromptImage, rules: ImageRules) -> list[int]:
    if not rules.line_ends:
        return [rules.token] * image.length
    inner, last = rules.line_ends
    return [*([*[rules.token] * image.columns, inner] * image.rows)[:-1], last]


def _parts(message: object) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def is_picture(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def _text(part: object) -> dict[str, str]:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise InvalidRequest(
        f"a content part must be of type text, image or image_url, got {kind!r:.60}; leave it out"
    )


def _given(part: Mapping[str, Any]) -> object:
    given: object = part.get("image_url", part.get("image"))
    return given.get("url") if isinstance(given, Mapping) else given


def _taken(part: Mapping[str, Any], max_bytes: int) -> bytes | ImageTensors:
    given = _given(part)
    return given if isinstance(given, ImageTensors) else bytes_of(part, max_bytes)


def bytes_of(part: Mapping[str, Any], max_bytes: int) -> bytes:
    """Return an image file's bytes. A string is never used as a path, because it may come from a client."""
    given = _given(part)
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if isinstance(given, str):
        return of_url(given, max_bytes)
    if isinstance(given, Path):
        return _of_file(given, max_bytes)
    if callable(save := getattr(given, "save", None)):
        file = io.BytesIO()
        save(file, format="PNG")
        return file.getvalue()
    raise InvalidRequest(
        f"an image must be a Path, bytes, a Pillow image or a data: URL, got {given!r:.60}; write "
        '{"type": "image", "image": Path("cat.png")}'
    )


def _of_file(path: Path, max_bytes: int) -> bytes:
    try:
        if (size := path.stat().st_size) > max_bytes:
            raise InvalidRequest(f"{path} must have at most {max_bytes} bytes, got {size}; scale it down")
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}; give the path of a picture") from None


def of_url(url: str, max_bytes: int) -> bytes:
    """Return the bytes in a data: URL. Raises InvalidRequest for any other URL."""
    head, _, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise InvalidRequest(
            "the URL of an image must be a data: URL in base64, because nothing is fetched, got "
            f"{url!r:.60}; write data:image/png;base64,... or, in Python, a Path"
        )
    if len(data) > max_bytes * 4 // 3 + 4:
        raise InvalidRequest(f"a picture must have at most {max_bytes} bytes, got more; scale it down")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"a data: URL must hold base64, got {data!r:.40} ({error})") from None
