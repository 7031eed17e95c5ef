"""Helper process that decodes and resizes images of clients.

A decoder's error or a decompression bomb costs only one answer. Messages to this process (<-) and from
it (->):

    <- {"rules": ..., "max_pixels", "memory_bytes"}   once
    -> {"ready": true}
    <- {}, followed by the bytes of an image
    -> {"height", "width"}, followed by the pixels; or {"refused": reason}
"""

from __future__ import annotations

import io
import os
import resource
import sys
import warnings
from multiprocessing.connection import Connection
from typing import Any

from ..api.image import ImageRules, Size
from ..structured_output.helper_process import received, send

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
NICENESS = 5


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    os.nice(NICENESS)
    messages = received(connection)
    limits = next(messages)
    rules, most = ImageRules(**limits["rules"]), limits["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    from PIL import Image

    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # checked before decoding
    send(connection, {"ready": True})
    for message in messages:
        try:
            size, pixels = resized(message["bytes"], rules, max_pixels=limits["max_pixels"])
            send(connection, size._asdict(), pixels)
        except BrokenPipeError:
            return
        except MemoryError:
            send(connection, {"refused": "it takes too much memory"})
        except Exception as error:  # decoders may raise anything
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            send(connection, {"refused": reason})


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


if __name__ == "__main__":
    main()
