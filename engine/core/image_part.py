"""Step part for images in prompts."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from octavo.kernels.metadata import Ints
from octavo.scheduler import ScheduledChunk, SchedulerOutput, Sequence

from ..api.image import PromptImage
from ..executor.base import EncodedImage, Images
from ..executor.batch import RowInput
from .request import Request, Sample
from .step_parts import PartRows, StepPart

IS_IMAGE, FEATURES, DEEPSTACK = "image_rows", "image_features", "image_deepstack"
AXES = ("position_t", "position_h", "position_w")


class ImagePart(StepPart):
    """Adds image features to the rows of image tokens."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self._prompts: WeakKeyDictionary[Sequence, _Prompt] = WeakKeyDictionary()

    @property
    def is_live(self) -> bool:
        return bool(self._prompts)

    def begin(self, request: Request) -> None:
        if request.images:
            axes = Axes(request.num_prompt, request.images) if self._images.has_axes else None
            prompt = _Prompt(request.images, axes, {})
            self._prompts.update((sample.sequence, prompt) for sample in request.samples)

    def end(self, sample: Sample) -> None:
        self._prompts.pop(sample.sequence, None)

    def rows(self, step: SchedulerOutput) -> PartRows | None:
        prompts = [(item, self._prompts.get(item.sequence)) for item in step.work]
        if not any(prompt for _, prompt in prompts):
            return None
        inputs: dict[str, RowInput] = {}
        if self._images.has_axes:
            axes = [
                _plain(item.start, item.end)
                if prompt is None or prompt.axes is None
                else prompt.axes.of(item.start, item.end)
                for item, prompt in prompts
            ]
            inputs.update(zip(AXES, np.concatenate(axes, axis=1), strict=True))
        row, found = 0, []
        last = np.concatenate([np.arange(item.start, item.end, dtype=np.int32) for item, _ in prompts])
        for item, prompt in prompts:
            if prompt is not None:
                for at, part in self._encoded(item, prompt):
                    first = row + at - item.start
                    found.append((first, part))
                    if part.image.is_whole:
                        last[first : first + part.last - part.first] = part.image.start + part.last - 1
            row += item.end - item.start
        if not found:
            return PartRows(inputs=inputs) if inputs else None
        sees_later = any(part.image.is_whole for _, part in found)
        return PartRows(inputs=inputs | _laid_out(row, found), last=last if sees_later else None)

    def _encoded(self, item: ScheduledChunk, prompt: _Prompt) -> list[tuple[int, _Part]]:
        parts = []
        for image in prompt.images:
            first, last = max(item.start, image.start), min(item.stop, image.start + image.length)
            if first >= last:
                continue
            encoded = prompt.held.pop(image.start, None) or self._images.encode(image)
            if last < image.start + image.length:
                prompt.held[image.start] = encoded
            parts.append((first, _Part(image, encoded, first - image.start, last - image.start)))
        return parts


class _Prompt(NamedTuple):
    images: tuple[PromptImage, ...]
    axes: Axes | None
    held: dict[int, EncodedImage]


class _Part(NamedTuple):
    image: PromptImage
    encoded: EncodedImage
    first: int
    last: int


def _laid_out(count: int, parts: list[tuple[int, _Part]]) -> dict[str, RowInput]:
    sample = parts[0][1].encoded
    inputs: dict[str, RowInput] = {
        IS_IMAGE: np.zeros(count, np.int32),
        FEATURES: np.zeros((count, sample.features.shape[1]), np.float32),
    }
    if sample.deepstack is not None:
        inputs[DEEPSTACK] = np.zeros((count, *sample.deepstack.shape[1:]), np.float32)
    for row, (image, encoded, first, last) in parts:
        rows = slice(row, row + last - first)
        inputs[IS_IMAGE][rows] = np.arange(first, last) % (image.columns + image.has_ends) < image.columns
        inputs[FEATURES][rows] = encoded.features[first:last]
        if encoded.deepstack is not None:
            inputs[DEEPSTACK][rows] = encoded.deepstack[first:last]
    return inputs


class Axes:
    """Positions of a sequence's tokens in time, height and width (M-RoPE).

    The three positions of a text token are equal. All tokens of an image have an equal time.
    """

    def __init__(self, num_prompt: int, images: tuple[PromptImage, ...]) -> None:
        axes = _plain(0, num_prompt)
        for image in images:
            stop = image.start + image.length
            begin = axes[0, image.start]
            grid = np.indices((1, image.rows, image.columns), np.int32).reshape(3, -1)
            axes[:, image.start : stop] = begin + grid
            behind = begin + max(image.rows, image.columns)
            axes[:, stop:] = behind + np.arange(num_prompt - stop, dtype=np.int32)
        self._prompt = axes
        self._shift = int(axes.max()) + 1 - num_prompt

    def of(self, start: int, stop: int) -> Ints:
        positions = _plain(start, stop)
        positions += np.int32(self._shift)
        known = self._prompt[:, start:stop]
        positions[:, : known.shape[1]] = known
        return positions


def _plain(start: int, stop: int) -> Ints:
    return np.tile(np.arange(start, stop, dtype=np.int32), (3, 1))
