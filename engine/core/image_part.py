from __future__ import annotations

import sys
import time
from collections.abc import Callable, Set
from collections.abc import Sequence as Samples
from typing import NamedTuple

import numpy as np

from octavo.block_manager import BlockManager
from octavo.kernels.metadata import Ints
from octavo.scheduler import Admission, Resource, ScheduledChunk, SchedulerOutput, Sequence
from octavo.scheduler.waiting import cached_tokens

from ..api.image import PromptImage
from ..executor.base import EncodedImage, Images
from ..executor.batch import RowInput
from .request import Request, Sample
from .step_parts import PartRows, StepPart
from .step_stats import StepStats

IS_IMAGE, FEATURES, DEEPSTACK = "image_rows", "image_features", "image_deepstack"
AXES = ("position_t", "position_h", "position_w")


MAX_READY = 4
"""Largest number of waiting sequences with an encoded image."""

NUM_RECENT = 16
"""Number of portions whose longest time predicts the next portion's time."""

SLICE_S = 0.1
"""Seconds of encoding between two steps without a latency target."""


class ImagePart(StepPart, Resource):
    """Encodes images between steps, and adds their features to the rows of image tokens.

    A sequence whose next chunk needs an unencoded image waits without pages (``WAITING_FOR_MEDIA``).
    Images of running sequences come first. An encoded image is kept until its last row is computed.
    """

    def __init__(
        self,
        images: Images,
        blocks: BlockManager,
        *,
        stats: StepStats,
        max_step_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._images = images
        self._blocks = blocks
        self._stats = stats
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._prompts: dict[Sequence, _Prompt] = {}
        self._waiting: dict[Sequence, PromptImage] = {}
        self._ready: set[Sequence] = set()
        self._paused: set[Sequence] = set()
        self._current: PromptImage | None = None
        self._encode_step_s: list[float] = []
        self._new: bytes | None = None

    @property
    def is_live(self) -> bool:
        return bool(self._prompts)

    @property
    def is_pending(self) -> bool:
        return bool(self._waiting)

    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._paused)

    def begin(self, request: Request) -> None:
        if request.images:
            axes = Axes(request.num_prompt, request.images) if self._images.has_axes else None
            for sample in request.samples:
                self._prompts[sample.sequence] = _Prompt(request.images, axes, {})

    def end(self, sample: Sample) -> None:
        sequence = sample.sequence
        self._prompts.pop(sequence, None)
        self._waiting.pop(sequence, None)
        self._ready.discard(sequence)
        self._paused.discard(sequence)

    def hold(self, sequence: Sequence) -> Admission:
        """Admit a sequence, unless its next chunk needs an unencoded image."""
        prompt = self._prompts.get(sequence)
        if prompt is None:
            return Admission.ADMITTED
        start = cached_tokens(sequence, self._blocks)
        missing = self._missing(prompt, start)
        if (
            missing is None
            or missing.start >= start + self._max_step_tokens
            or any(encoded < missing.start for encoded in prompt.ready)
        ):
            return Admission.ADMITTED
        prompt.ready.clear()
        self._ready.discard(sequence)
        self._waiting[sequence] = missing
        return Admission.NO_MEDIA

    def num_ready(self, sequence: Sequence) -> int:
        if (prompt := self._prompts.get(sequence)) is None:
            return sys.maxsize
        start, ready = sequence.num_written, prompt.ready
        ahead = (image.start for image in prompt.images if image.start + image.length > start)
        return next((image_start for image_start in ahead if image_start not in ready), sys.maxsize)

    def work(self, time_left: Callable[[], float | None]) -> list[Sequence] | None:
        """Encode the next portions of an image; return the sequences that may continue."""
        if (image := self._next_image()) is None:
            return None
        if self._current is None or self._current.digest != image.digest:
            self._current, self._encode_step_s = image, []
        encode_step_s, first = self._encode_step_s, len(self._encode_step_s)
        left_s = SLICE_S if (spare_s := time_left()) is None else spare_s
        while True:
            began = self._clock()
            encoded = self._images.advance(image)
            encode_step_s.append(self._clock() - began)
            # The first portion only prepares pixels, so its time does not predict the others.
            spent_s, next_s = sum(encode_step_s[first:]), max(encode_step_s[-NUM_RECENT:])
            if encoded is not None or not first or spent_s + next_s > left_s:
                break
        if encoded is None:
            return []
        self._current = None
        self._new = image.digest
        self._stats.encoded(sum(encode_step_s))
        self._next_image()
        return self._take_ready()

    def _take_ready(self) -> list[Sequence]:
        ready = []
        for sequence, image in list(self._waiting.items()):
            if self._missing(self._prompts[sequence], image.start) is not image:
                del self._waiting[sequence]
                self._ready.add(sequence)
                ready.append(sequence)
        return ready

    def _next_image(self) -> PromptImage | None:
        urgent, later = list[PromptImage](), list[PromptImage]()
        self._paused.clear()
        for sequence, prompt in self._prompts.items():
            if sequence.table is None or (start := sequence.num_written) >= prompt.stop:
                continue
            if (missing := self._missing(prompt, start)) is not None:
                if missing.start <= start:
                    self._paused.add(sequence)
                (urgent if missing.start <= start else later).append(missing)
        self._ready = {sequence for sequence in self._ready if sequence.table is None}
        if len(self._ready) < MAX_READY:
            urgent += self._waiting.values()
        wanted = [*urgent, *later]
        current = self._current
        if current is not None and any(image.digest == current.digest for image in wanted):
            return current
        return wanted[0] if wanted else None

    def _missing(self, prompt: _Prompt, start: int) -> PromptImage | None:
        num_rows = 0
        for image in prompt.images:
            if image.start + image.length <= start:
                prompt.ready.pop(image.start, None)
                continue
            if image.start not in prompt.ready:
                is_near = num_rows < self._max_step_tokens
                encoded = self._images.find(image.digest) if is_near else None
                if encoded is None:
                    return image if is_near else None
                prompt.ready[image.start] = encoded
                if image.digest != self._new:
                    self._stats.hit_image()
                self._new = None
            num_rows += image.length
        return None

    def paused(self) -> Set[Sequence]:
        return self._paused

    def may_overlap(self, unfinished: Samples[Sample]) -> bool:  # noqa: ARG002
        return not self.num_waiting()

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
                    if part.image.is_bidirectional:
                        last[first : first + part.last - part.first] = part.image.start + part.last - 1
            row += item.end - item.start
        if not found:
            return PartRows(inputs=inputs) if inputs else None
        sees_later = any(part.image.is_bidirectional for _, part in found)
        return PartRows(inputs=inputs | _row_inputs(row, found), last=last if sees_later else None)

    def _encoded(self, item: ScheduledChunk, prompt: _Prompt) -> list[tuple[int, _Part]]:
        parts = []
        for image in prompt.images:
            first, last = max(item.start, image.start), min(item.stop, image.start + image.length)
            if first >= last:
                continue
            encoded = prompt.ready[image.start]
            if last == image.start + image.length:
                del prompt.ready[image.start]
            parts.append((first, _Part(image, encoded, first - image.start, last - image.start)))
        return parts


class _Prompt(NamedTuple):
    images: tuple[PromptImage, ...]
    axes: Axes | None
    ready: dict[int, EncodedImage]

    @property
    def stop(self) -> int:
        return self.images[-1].start + self.images[-1].length


class _Part(NamedTuple):
    image: PromptImage
    encoded: EncodedImage
    first: int
    last: int


def _row_inputs(count: int, parts: list[tuple[int, _Part]]) -> dict[str, RowInput]:
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

    The three positions of a text token are equal. All tokens of an image have the same time position.
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
