from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fake_images import RULES, grid_of, patches_of
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.image import ImageRules, ImageTensors, PromptImage, Size, Tensor
from octavo.engine.vision.tensors import place_tensors

SQUARES = replace(RULES, merge=1, temporal=1, fit="square", edge=32, max_pixels=1024)
MARK = RULES.token


def pixels(rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    shape = (rows * RULES.side, columns * RULES.side, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def wanted(rules: ImageRules, *images: npt.NDArray[np.uint8]) -> list[PromptImage]:
    return [PromptImage.of(rules, Size(*each.shape[:2]), each.tobytes()) for each in images]


def tensor(values: npt.NDArray[Any], dtype: str) -> Tensor:
    return Tensor(values.astype(dtype).tobytes(), values.shape, dtype)


def normalized(values: npt.NDArray[Any], rules: ImageRules) -> npt.NDArray[np.float32]:
    mean, std = np.array(rules.mean, np.float32), np.array(rules.std, np.float32)
    return np.asarray((values.astype(np.float32) / 255 - mean) / std, np.float32)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16"])
def test_pixels_are_recovered_from_patches(dtype: str) -> None:
    rules = replace(RULES, mean=(0.48, 0.46, 0.41), std=(0.27, 0.26, 0.28))
    images = [pixels(2, 3), pixels(1, 2, seed=1)]
    made = [each if dtype == "uint8" else normalized(each, rules) for each in images]
    values = np.concatenate([patches_of(each, rules) for each in made])
    given = ImageTensors(tensor(values, dtype), tensor(grid_of(rules, *images), "int64"), ((1, 6), (8, 2)))
    placed = place_tensors([1, *[MARK] * 6, 2, MARK, MARK], given, rules)
    assert [each.start for each in placed.images] == [1, 8]
    assert [each._replace(start=0) for each in placed.images] == wanted(rules, *images)


def test_pixels_are_recovered_from_planes() -> None:
    image = pixels(1, 1)
    values = normalized(image, SQUARES).transpose(2, 0, 1)[None]
    placed = place_tensors([MARK] * 4, ImageTensors(tensor(values, "float32"), None, ((0, 4),)), SQUARES)
    assert list(placed.images) == wanted(SQUARES, image)


def test_tensors_that_do_not_fit_are_refused() -> None:
    image = pixels(2, 3)
    patches, grid = patches_of(image, RULES), grid_of(RULES, image)
    other = patches.copy()
    other[0, -1] ^= 1  # the second copy of a patch
    far = normalized(patches.reshape(-1, 3), RULES).reshape(patches.shape) + np.float32(0.006)
    good = ImageTensors(tensor(patches, "uint8"), tensor(grid, "int64"), ((1, 6),))
    ids = [1, *[MARK] * 6, 2]
    place_tensors(ids, good, RULES)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("must have 1 to 64 images, got 0", {"places": ()}),
        (r"must be \[2, 3\]", {"places": ((1, 3), (4, 3))}),
        ("96 x 64 pixels must have 6 placeholders .* got 5 tokens at 1", {"places": ((1, 5),)}),
        ("got 6 tokens at 2", {"places": ((2, 6),)}),
        ("got 6 tokens at 4294967295", {"places": ((2**32 - 1, 6),)}),
        ("must be of type uint8, .* got 'bfloat16'", {"pixels": Tensor(b"", (), "bfloat16")}),
        ("must have .* values of uint8", {"pixels": Tensor(b"abc", patches.shape, "uint8")}),
        ("must have .* values of uint8", {"pixels": Tensor(b"", (2**32 - 1,) * 8, "uint8")}),
        ("must have the shape", {"pixels": tensor(patches[1:], "uint8")}),
        ("must be 8-bit pixels", {"pixels": tensor(far, "float32")}),
        *(
            ("must be 8-bit pixels", {"pixels": tensor(np.full(patches.shape, value), "float32")})
            for value in (np.inf, 3e38, 2 * 256 / 255 - 1, -2 / 255 - 1)
        ),
        ("must repeat", {"pixels": tensor(np.full(patches.shape, np.nan), "float32")}),
        ("must repeat one image", {"pixels": tensor(other, "uint8")}),
        ("or patches with image_grid_thw", {"grids": None}),
        ("a time of 1", {"grids": tensor(np.array([[2, 2, 6]]), "int64")}),
        ("a time of 1", {"grids": tensor(np.array([[1, 3, 8]]), "int64")}),
        ("a time of 1", {"grids": tensor(np.array([[1, -4, -6]]), "int64")}),
        ("a time of 1", {"grids": tensor(np.array([[1, 0, 6]]), "int64")}),
        ("must have the shape", {"grids": tensor(np.array([[1, 2**62, 2**62]]), "int64")}),
        ("must have 1 images, .* got 2", {"grids": None, "pixels": Tensor(b"", (2, 3, 0, 8), "uint8")}),
        ("must have a size", {"grids": None, "pixels": Tensor(b"", (1, 3, 0, 8), "uint8")}),
    ]  # fmt: skip
    for message, changes in wrong:
        with pytest.raises(InvalidRequest, match=message):
            place_tensors(ids, good._replace(**changes), RULES)
    small = replace(RULES, max_pixels=5 * RULES.side**2)
    with pytest.raises(InvalidRequest, match="at most 5120 pixels, got 96 x 64"):
        place_tensors(ids, good, small)
