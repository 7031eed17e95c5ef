from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_images import RULES
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.image import PromptImage, Size
from octavo.engine.api.prompt import ChatPrompt
from octavo.engine.tokenizer.chat_template import ChatTemplate
from octavo.engine.vision.messages import has_pictures, set_images, take_pictures

URL = "data:image/png;base64," + base64.b64encode(b"file").decode()


def chat(*parts: Any) -> ChatPrompt:
    return ChatPrompt([{"role": "system", "content": "be brief"}, {"role": "user", "content": list(parts)}])


def image(rows: int, columns: int) -> PromptImage:
    size = Size(rows * RULES.side, columns * RULES.side)
    return PromptImage.of(RULES, size, bytes(3 * size.height * size.width))


def test_images_are_taken_from_parts_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    file.write_bytes(b"cat")
    given = chat(
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": URL},
        {"type": "image", "image": file},
        {"type": "image", "image": b"bytes"},
        {"type": "text", "text": "b"},
    )
    assert has_pictures(given.messages)
    taken, files = take_pictures(given, max_bytes=100)
    assert files == [b"file", b"file", b"cat", b"bytes"]
    template = ChatTemplate(
        "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]{% else %}"
        "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}"
        "{% endfor %}",
        {},
    )  # fmt: skip
    assert template.render(taken) == "[be brief]a<image><image><image><image>b"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": "/etc/passwd"}, "must be a data: URL"),  # not opened as a path
        ({"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}, "nothing is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}, "must hold base64"),
        ({"type": "image_url", "image_url": {"url": URL + "A" * 200}}, "must have at most 100 bytes"),
        ({"type": "image", "image": Path("/nowhere.png")}, "cannot be read"),
        ({"type": "image", "image": 5}, "must be a Path, bytes"),
        ({"type": "image"}, "must be a Path, bytes"),
    ],
)
def test_wrong_images_are_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        take_pictures(chat(part), max_bytes=100)


def test_other_parts_beside_images_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'video'"):
        take_pictures(chat({"type": "image", "image": b"x"}, {"type": "video"}), max_bytes=100)
    with pytest.raises(InvalidRequest, match="at most 64 images"):
        take_pictures(chat(*[{"type": "image", "image": b"x"}] * 65), max_bytes=100)


def test_a_text_model_refuses_images() -> None:
    with pytest.raises(InvalidRequest, match="reads only text"):
        ChatTemplate("", {}).render(chat({"type": "image_url", "image_url": {"url": URL}}))


def test_each_mark_becomes_as_many_placeholders_as_rows() -> None:
    mark = RULES.token
    encoded = set_images([1, mark, 2, mark], [image(2, 3), image(1, 2)], RULES)
    assert encoded.ids == [1, *[mark] * 6, 2, mark, mark]
    assert [(each.start, each.length) for each in encoded.images] == [(1, 6), (8, 2)]
    for ids in ([1, mark], [mark] * 3, [1]):
        with pytest.raises(InvalidRequest, match="for each of its 2 images"):
            set_images(ids, [image(2, 3), image(1, 2)], RULES)


def test_images_are_named_by_pixels_size_and_rules() -> None:
    pixels = bytes(3 * 64 * 32)
    named = {
        PromptImage.of(rules, size, data).digest
        for rules in (RULES, replace(RULES, mean=(0.4,) * 3))
        for size in (Size(64, 32), Size(32, 64))
        for data in (pixels, b"\1" + pixels[1:])
    }
    assert len(named) == 8


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_filled_sizes_are_the_largest_of_their_ratio(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    size = replace(RULES, fit="fill").size_for(Size(height, width))
    tall, wide = size.height // 32, size.width // 32
    assert (tall * 32, wide * 32) == size
    assert 1 <= tall * wide <= 2**20 // 32**2
    assert (tall + 1) * (wide + 1) >= 2**20 // 32**2 or min(tall, wide) == 1


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_sizes_are_whole_squares_within_the_limits(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidRequest, match="at most 200 times"):
            RULES.size_for(Size(height, width))
        return
    size = RULES.size_for(Size(height, width))
    assert size.height % 32 == size.width % 32 == 0
    assert min(size) >= 32
    slack = 32 * max(size)
    assert RULES.min_pixels <= size.height * size.width <= RULES.max_pixels + slack
