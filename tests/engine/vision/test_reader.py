from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from fake_images import RULES, bomb
from octavo.engine.api.errors import InvalidRequest, RequestFailed
from octavo.engine.vision.reader import PictureLimits, PictureReader


@pytest.fixture
def reader() -> Iterator[PictureReader]:
    made = PictureReader(RULES)
    yield made
    made.close()


def encoded(picture: Image.Image, form: str = "PNG", **how: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, form, **how)
    return file.getvalue()


def test_images_are_decoded_as_by_pillow(reader: PictureReader) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    image = reader.read(encoded(picture))
    assert (image.rows, image.columns, image.pixels) == (2, 3, picture.tobytes())
    for mode, form in (("L", "PNG"), ("RGBA", "WEBP"), ("P", "GIF"), ("CMYK", "JPEG")):
        assert (found := reader.read(encoded(picture.convert(mode), form))).length == 6
        assert len(found.pixels) == 3 * 64 * 96
    turned = picture.getexif()
    turned[0x0112] = 6  # EXIF orientation: rotated
    assert (reader.read(encoded(picture, "JPEG", exif=turned)).rows, image.digest) == (
        3,
        reader.read(encoded(picture)).digest,
    )


def test_wrong_images_cost_one_error_each(reader: PictureReader) -> None:
    good = encoded(Image.new("RGB", (64, 64)))
    moving = encoded(
        Image.new("RGB", (64, 64)), "GIF", save_all=True, append_images=[Image.new("RGB", (64, 64), "red")]
    )
    noise = Image.effect_noise((64, 64), 50)
    wrong = [
        (b"", "must have 1 to .* got 0; send the whole file"),
        (bytes(reader.limits.max_bytes + 1), "must have 1 to .*; scale it down"),
        (b"GIF89a but not", "cannot be used"),
        (b"<svg/>", "must be one of PNG"),
        (encoded(noise)[:900], "cannot be used"),
        (bomb(10_000), "at most 36000000 pixels, got 100000000"),
        (bomb(2**30), "cannot be used"),
        (moving, "one frame, got 2"),
        (encoded(Image.new("RGB", (801, 4))), "at most 200 times"),
    ]
    for data, message in wrong:
        with pytest.raises(InvalidRequest, match=message):
            reader.read(data)
        assert reader.read(good).length == 4


def test_a_process_that_dies_or_hangs_is_replaced(reader: PictureReader) -> None:
    good = encoded(Image.new("RGB", (64, 64)))
    reader.read(good)
    assert reader._process is not None
    os.kill(reader._process.pid, signal.SIGKILL)
    reader._process.wait()
    assert reader.read(good).length == 4
    hanging = PictureReader(RULES, PictureLimits(seconds=0.2))
    try:
        hanging.read(good)
        assert hanging._process is not None
        os.kill(hanging._process.pid, signal.SIGSTOP)
        with pytest.raises(InvalidRequest, match=r"more than 0\.2 s"):
            hanging.read(good)
    finally:
        hanging.close()


def test_a_closed_reader_starts_nothing(reader: PictureReader) -> None:
    reader.close()
    with pytest.raises(RequestFailed, match="stopped"):
        reader.read(encoded(Image.new("RGB", (64, 64))))
