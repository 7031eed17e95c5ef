from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from fake_images import FakeImages
from fakes import FakeCore, Recording, small_config
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.engine_request import EngineRequest
from octavo.engine.api.image import PromptImage
from octavo.engine.api.outputs import FinishReason
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.image_part import ImagePart
from octavo.engine.core.request import Request
from octavo.scheduler import Status

ROWS = 8


@dataclass
class Served:
    images: FakeImages
    config: EngineConfig
    step_s: float = 0.01
    portion_s: float = 0.06  # without a target, one portion runs between two steps
    now: float = 1000.0
    observer: Recording = field(default_factory=Recording)
    pauses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.images.portion = lambda _: self.passes(self.portion_s)
        make = FakeCore(
            images=self.images, clock=lambda: self.now, before_step=lambda: self.passes(self.step_s)
        )
        self.core: EngineCore = make(self.config, self.observer)
        self.num_portions = 0

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.num_portions += seconds == self.portion_s

    def add(self, name: str, *parts: int | bytes, tokens: int = 3, n: int = 1) -> Request:
        ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, bytes):
                images.append(PromptImage(len(ids), 2, ROWS // 2, part, b""))
                ids += [250] * ROWS
            else:
                ids += [ord(name[0]) + place % 50 for place in range(part)]
        request = self.core.builder.build(
            EngineRequest(
                request_id=name,
                prompt_ids=ids,
                params=SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, n=n),
                max_tokens=tokens,
                arrived_at=self.now,
                images=tuple(images),
            )
        )
        self.core.add(request)
        return request

    def step(self) -> None:
        self.core.step()
        self.core._blocks.check()

    def run(self) -> None:
        for _ in range(1000):
            if not self.core.has_work:
                break
            self.step()
        gauges = self.core.gauges
        assert (gauges.num_running, gauges.num_waiting, gauges.media_waits) == (0, 0, 0)
        assert gauges.pages_held == 0
        part = self.part
        assert not any((part._prompts, part._waiting, part._ready, part._paused))

    @property
    def part(self) -> ImagePart:
        (part,) = [each for each in self.core._parts._parts if isinstance(each, ImagePart)]
        return part


Serve = Callable[..., Served]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    def make(num_portions: int = 5, **changes: object) -> Served:
        config = {"max_step_tokens": 16, "target_itl": "off"} | changes
        served = Served(FakeImages(num_portions=num_portions), small_config(**config))
        monkeypatch.setattr(time, "sleep", served.pauses.append)
        return served

    return make


def status(request: Request) -> Status:
    return request.samples[0].sequence.status


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def test_a_request_waits_for_its_image_without_pages(serve: Serve) -> None:
    served = serve()
    text = served.add("text", 5, tokens=30)
    served.step()
    waits = served.add("waits", 3, digest(1), 2)
    served.step()
    held = served.core.gauges.pages_held
    for portion in range(1, 5):
        before = text.num_generated
        served.step()
        assert served.images.done[digest(1)] == portion
        assert text.num_generated == before + 1, "text gets its token in every step"
        assert status(waits) is Status.WAITING_FOR_MEDIA
        assert waits.samples[0].sequence.table is None
        gauges = served.core.gauges
        assert (gauges.media_waits, gauges.num_waiting, gauges.num_running) == (1, 1, 1)
    assert served.core.gauges.pages_held <= held + 1, "pages of the text alone"
    served.step()
    assert status(waits) is Status.RUNNING
    assert waits.num_generated == 1
    served.run()
    assert waits.finish_reason is FinishReason.LENGTH


def test_an_image_alone_is_encoded_without_a_pause(serve: Serve) -> None:
    served = serve(num_portions=7)
    request = served.add("alone", 3, digest(1), 2, tokens=1)
    served.run()
    assert served.now - 1000 == pytest.approx(7 * 0.06 + 0.01), "seven portions and one step"
    assert len(served.pauses) <= 1, "no pause beside work"
    assert request.finish_reason is FinishReason.LENGTH
    served.add("text", 3)
    served.run()
    records = served.observer.records
    assert [seconds for record in records for seconds in record.encoded_s] == [pytest.approx(0.42)]


def test_images_are_encoded_one_at_a_time_in_order(serve: Serve) -> None:
    served = serve(num_portions=2, max_step_tokens=32)
    served.add("first", 3, digest(1), 4, digest(2), 2)
    served.add("next", 2, digest(3), 2)
    served.add("same", 1, digest(1), 2)
    served.run()
    assert served.images.encoded == [digest(1), digest(2), digest(3)]
    assert served.num_portions == 6
    assert sum(record.image_hits for record in served.observer.records) == 1, "the picture of two requests"


def test_text_before_a_distant_image_is_computed_meanwhile(serve: Serve) -> None:
    served = serve(num_portions=3)
    request = served.add("long", 40, digest(1), 30, digest(2), 2)
    sequence = request.samples[0].sequence
    served.step()
    assert (sequence.num_written, served.part.num_ready(sequence)) == (16, 40)
    served.step()
    served.step()
    assert sequence.num_written == 40, "a chunk ends before an image that is not encoded"
    assert served.images.encoded == []
    served.step()
    assert served.images.encoded == [digest(1)]
    served.run()
    assert served.images.encoded == [digest(1), digest(2)]
    assert request.finish_reason is FinishReason.LENGTH


def test_a_running_prompt_that_stops_at_an_image_lets_others_run(serve: Serve) -> None:
    served = serve(num_portions=9)
    text = served.add("text", 5, tokens=40)
    stops = served.add("stops", 20, digest(1), 2)
    while stops.samples[0].sequence.num_written < 20:
        served.step()
    before, encoded = text.num_generated, served.images.done[digest(1)]
    served.step()
    assert served.core.gauges.media_waits == 1
    assert text.num_generated == before + 1
    assert served.images.done[digest(1)] == encoded + 1
    served.run()
    assert stops.finish_reason is FinishReason.LENGTH


def test_an_aborted_request_that_waits_leaves_nothing(serve: Serve) -> None:
    served = serve()
    text = served.add("text", 5, tokens=20)
    for _ in range(3):
        gone = served.add("gone", 3, digest(1), 2, n=2)
        served.step()
        served.step()
        assert status(gone) is Status.WAITING_FOR_MEDIA
        served.core.abort(gone)
        assert gone.finish_reason is FinishReason.ABORT
        served.step()
        assert served.core.gauges.media_waits == served.core.gauges.num_waiting == 0
    again = served.add("again", 3, digest(1), 2)
    served.run()
    assert served.images.encoded == [digest(1)]
    assert {again.finish_reason, text.finish_reason} == {FinishReason.LENGTH}


def test_a_prompt_preempted_at_an_image_loses_nothing(serve: Serve) -> None:
    served = serve(num_portions=60, num_pages=14, prefix_cache=False)
    text = served.add("text", 5, tokens=30)
    served.step()
    stops = served.add("stops", 17, digest(1), 2)
    while stops.samples[0].sequence.num_written < 17:
        served.step()
    sequence = stops.samples[0].sequence
    while sequence.table is not None:
        assert text.finish_reason is None, "the text needs the pages"
        served.step()
    assert sequence.history.num_preempted == 1
    served.run()
    assert {stops.finish_reason, text.finish_reason} == {FinishReason.LENGTH}
    assert served.images.encoded == [digest(1)]


def test_prompts_with_more_images_than_the_cache_keeps_end(serve: Serve) -> None:
    served = serve(num_portions=2, num_pages=24)
    served.images.max_kept = 1
    requests = [
        served.add(f"{n} many", 3, digest(n), digest(n + 10), 4, digest(n + 20), 2, tokens=6)
        for n in range(1, 6)
    ]
    served.run()
    assert {each.finish_reason for each in requests} == {FinishReason.LENGTH}
    assert len(served.images.encoded) <= 2 * 15, "few are encoded again"


@pytest.mark.parametrize(
    ("target", "fewest", "most", "gap_s"), [("off", 4, 12, 0.1 + 0.01), (50, 2, 4, 0.05 * 1.3)]
)
def test_streams_keep_their_target_beside_images(
    serve: Serve, target: str | int, fewest: int, most: int, gap_s: float
) -> None:
    """A decode takes 10 ms and an image portion 8 ms, so two to four portions fit into 50 ms."""
    served = serve(num_portions=28, target_itl=target, num_pages=400, max_step_tokens=32)
    served.portion_s = 0.008
    texts = [served.add(f"text {n}", 5, tokens=200) for n in range(3)]
    for _ in range(20):
        served.step()
    gaps: list[float] = []
    counts: list[int] = []
    pictures = [served.add(f"picture {n}", 3, digest(n), 2, tokens=1) for n in range(1, 4)]
    while not all(each.finish_reason for each in pictures):
        before, portions = served.now, served.num_portions
        served.step()
        gaps.append(served.now - before)
        counts.append(served.num_portions - portions)
    assert all(each.finish_reason is None for each in texts)
    assert max(gaps) <= gap_s
    during = [count for count in counts if count]
    assert sum(during) == 3 * 28
    assert most >= max(during) >= fewest
    assert len(during) <= 3 * 28 / fewest + 3
