"""Images that a router has resized, from the tensors of its messages.

Tensors have 8-bit pixels, or 8-bit pixels that were normalized. The pixels are recovered exactly, so an image
has the same digest and cached pages in every form.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..api.errors import InvalidRequest
from ..api.image import ImageRules, ImageTensors, PromptImage, Size, Tensor
from ..api.prompt import EncodedPrompt
from .messages import tokens_of
from .reader import MAX_IMAGES

Array: TypeAlias = npt.NDArray[Any]
Pixels: TypeAlias = npt.NDArray[np.uint8]

_TYPES = {"uint8": "u1", "float16": "<f2", "float32": "<f4"}  # bfloat16 is too coarse for 8-bit pixels
_WHOLE = {"int32": "<i4", "uint32": "<u4", "int64": "<i8"}
_MOST_DIMS = 32
_FAR = 0.1  # distance from a whole number; float16 pixels are up to 0.07 away


def place_tensors(ids: list[int], given: ImageTensors, rules: ImageRules) -> EncodedPrompt:
    """Return the prompt with its images. Raises InvalidRequest."""
    if not 0 < len(given.places) <= MAX_IMAGES:
        raise InvalidRequest(
            f"mm_placeholders must have 1 to {MAX_IMAGES} images, got {len(given.places)}; leave some out"
        )
    images, end = [], 0
    found = images_of(given, len(given.places), rules)
    for image, (start, length) in zip(found, given.places, strict=True):
        end, least = start + length, end
        if start < least or ids[start:end] != tokens_of(image, rules):
            width, height = image.columns * rules.side, image.rows * rules.side
            raise InvalidRequest(
                f"an image of {width} x {height} pixels must have {image.length} placeholders (id "
                f"{rules.token}), after those of earlier images, got {length} tokens at {start}; repeat the "
                "placeholder"
            )
        images.append(image._replace(start=start))
    return EncodedPrompt(ids, tuple(images))


def images_of(given: ImageTensors, count: int, rules: ImageRules) -> list[PromptImage]:
    """Return ``count`` images without their places. Raises InvalidRequest."""
    pixels = _array("pixel_values", given.pixels, _TYPES)
    parts = _planes(pixels) if given.grids is None else _from_patches(pixels, given.grids, count, rules)
    if len(parts) != count:
        raise InvalidRequest(
            f"pixel_values must have {count} images, as the prompt, got {len(parts)}; send all images"
        )
    images = []
    for part in parts:
        size = Size(*part.shape[:2])
        _check_size(size, rules)
        images.append(PromptImage.of(rules, size, _pixels(part, given.pixels.dtype, rules).tobytes()))
    return images


def _check_size(size: Size, rules: ImageRules) -> None:
    is_fixed, side = rules.fit in ("square", "crop"), rules.side
    is_whole = min(size) > 0 and not size.height % side and not size.width % side
    if (
        not is_whole
        or size.height * size.width > rules.max_pixels
        or (is_fixed and set(size) != {rules.edge})
    ):
        raise InvalidRequest(
            f"images of pixel_values must have a size that the model takes, and at most {rules.max_pixels} "
            f"pixels, got {size.width} x {size.height}; send a data: URL, or start the server with a larger "
            "--max-image-pixels"
        )


def _pixels(values: Array, dtype: str, rules: ImageRules) -> Pixels:
    """Return 8-bit pixels of values [height, width, 3]."""
    if dtype == "uint8":
        return values
    mean, std = np.array(rules.mean, np.float32), np.array(rules.std, np.float32)
    with np.errstate(all="ignore"):
        scaled = (values.astype(np.float32) * std + mean) * np.float32(255)
        whole = np.rint(scaled)
        is_near = np.abs(scaled - whole) <= _FAR  # also false for NaN
    if not is_near.all() or whole.min() < 0 or whole.max() > 255:
        raise InvalidRequest(
            "pixel_values must be 8-bit pixels that were rescaled by 1/255 and normalized, got other values; "
            "preprocess as in the model's preprocessor_config.json"
        )
    return np.asarray(whole, np.uint8)


def _array(name: str, tensor: Tensor, types: dict[str, str]) -> Array:
    if tensor.dtype not in types:
        raise InvalidRequest(
            f"{name} must be of type {', '.join(types)}, got {tensor.dtype!r:.60}; convert it"
        )
    if len(tensor.shape) > _MOST_DIMS:
        raise InvalidRequest(
            f"{name} must have at most {_MOST_DIMS} dimensions, got {len(tensor.shape)}; reshape it"
        )
    made = np.frombuffer(tensor.values, np.uint8)
    kind = np.dtype(types[tensor.dtype])
    if math.prod(tensor.shape) * kind.itemsize != made.size:
        raise InvalidRequest(
            f"{name} must have {math.prod(tensor.shape)} values of {tensor.dtype}, as its shape says, got "
            f"{made.size} bytes; send all values"
        )
    return made.view(kind).reshape(tensor.shape)


def _planes(pixels: Array) -> list[Array]:
    """Return images [height, width, 3] from [n, 3, height, width]."""
    if pixels.ndim != 4 or pixels.shape[1] != 3:
        raise InvalidRequest(
            "pixel_values must be [images, 3, height, width], or patches with image_grid_thw, got "
            f"{list(pixels.shape)}; send whole images, not tiles"
        )
    return list(pixels.transpose(0, 2, 3, 1))


def _from_patches(pixels: Array, grids: Tensor, count: int, rules: ImageRules) -> list[Array]:
    grid = _array("image_grid_thw", grids, _WHOLE)
    merge, patch, temporal = rules.merge, rules.patch, rules.temporal
    is_image = grid.shape == (count, 3) and (grid[:, 0] == 1).all()
    if not is_image or (grid[:, 1:] < 1).any() or (grid[:, 1:] % merge).any():
        raise InvalidRequest(
            f"image_grid_thw must be [{count}, 3] with a time of 1 and squares of {merge} x {merge} patches, "
            f"got {grid[:10].tolist()!r:.100}; send images, not videos"
        )
    sizes: list[tuple[int, int]] = [(height // merge, width // merge) for _, height, width in grid.tolist()]
    counts = [height * width * merge**2 for height, width in sizes]
    wanted = (sum(counts), 3 * temporal * patch**2)
    if pixels.shape != wanted:
        raise InvalidRequest(
            f"pixel_values must have the shape {list(wanted)}, as image_grid_thw says, got "
            f"{list(pixels.shape)}; send all patches"
        )
    found, first = [], 0
    for (height, width), num_patches in zip(sizes, counts, strict=True):
        squares = pixels[first : first + num_patches]
        squares = squares.reshape(height, width, merge, merge, 3, temporal, patch, patch)
        if (squares != squares[:, :, :, :, :, :1]).any():
            raise InvalidRequest(
                "pixel_values must repeat one image in each patch, got several; send images, not videos"
            )
        image = squares[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
        found.append(image.reshape(height * merge * patch, width * merge * patch, 3))
        first += num_patches
    return found
