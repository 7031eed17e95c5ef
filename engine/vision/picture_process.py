"""Helper process that decodes and resizes images of clients.

A decoder's error or a decompression bomb costs only one answer. Messages are lines of JSON on standard
input and output:

    <- {"rules": ..., "max_pixels", "memory_bytes"}   once
    <- {"size"}, followed by the bytes of an image
    -> {"height", "width"}, followed by the pixels; or {"refused": reason}
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import warnings
from typing import IO, Any

from ..api.image import ImageRules, Size

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
NICENESS = 5


def main() -> None:
    source, out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries must not write among the answers
    os.nice(NICENESS)
    limits = json.loads(source.readline())
    rules, most = ImageRules(**limits["rules"]), limits["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    from PIL import Image

    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # checked before decoding
    _answer(out, {"ready": True})
    while line := source.readline():
        data = source.read(json.loads(line)["size"])
        try:
            size, pixels = resized(data, rules, max_pixels=limits["max_pixels"])
            _answer(out, size._asdict(), pixels)
        except MemoryError:
            _answer(out, {"refused": "it takes too much memory"})
        except Exception as error:  # decoders may raise anything
            _answer(out, {"refused": " ".join(str(error).split())[:200] or type(error).__name__})


def resized(data: bytes, rules: ImageRules, *, max_pixels: int) -> tuple[Size, bytes]:
    """Decode an image, turn it upright and resize it; return its new size and its pixels.

    Raises ValueError or InvalidRequest for an image that is too large, too long, or animated.
    """
    from PIL import Image, ImageOps

    picture = opened(data, max_pixels=max_pixels)
    picture = ImageOps.exif_transpose(picture)
    picture = picture if picture.mode == "RGB" else picture.convert("RGB")
    size = rules.size_for(Size(picture.height, picture.width))
    width, height = size.width, size.height
    if rules.fit == "crop":
        width, height = (side * size.width // min(picture.size) for side in picture.size)
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling(rules.resample))
    left, top = (width - size.width) // 2, (height - size.height) // 2
    picture = picture.crop((left, top, left + size.width, top + size.height))
    return size, picture.tobytes()


def opened(data: bytes, *, max_pixels: int) -> Any:
    """Return the image with only its header read. Raises ValueError."""
    from PIL import Image, UnidentifiedImageError

    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"it must be one of {', '.join(FORMATS)}") from None
    if (count := picture.width * picture.height) > max_pixels:
        raise ValueError(f"it must have at most {max_pixels} pixels, got {count}; scale it down")
    if picture.format != "MPO" and (frames := getattr(picture, "n_frames", 1)) > 1:
        raise ValueError(f"it must have one frame, got {frames}; send one frame as an image of its own")
    return picture


def _answer(out: IO[bytes], answer: dict[str, Any], pixels: bytes = b"") -> None:
    with contextlib.suppress(BrokenPipeError):
        out.write(json.dumps(answer).encode() + b"\n" + pixels)
        out.flush()


if __name__ == "__main__":
    main()
