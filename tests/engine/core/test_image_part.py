from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from fake_images import FakeImages
from fakes import FakeCore, byte_tokenizer, small_config
from octavo.engine.api.engine_request import EngineRequest
from octavo.engine.api.image import PromptImage
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.image_part import Axes
from octavo.engine.core.request import Request
from octavo.kernels.metadata import Ints

TOKEN = 250


@pytest.fixture
def images() -> FakeImages:
    return FakeImages()


@pytest.fixture
def core(images: FakeImages) -> Iterator[EngineCore]:
    made = FakeCore(tokenizer=byte_tokenizer(), images=images)(small_config(max_step_tokens=8))
    yield made
    made.finish()
    made.close()


def add(
    core: EngineCore, name: str, *, lead: int = 3, tail: int = 2, picture: bytes | None = b"\5" * 32
) -> Request:
    image = () if picture is None else (PromptImage(lead, 2, 4, picture, b""),)
    rows = 0 if picture is None else 8
    request = core.builder.build(
        EngineRequest(
            request_id=name,
            prompt_ids=[*range(1, lead + 1), *[TOKEN] * rows, *range(11, tail + 11)],
            params=SamplingParams(max_tokens=3, temperature=0, ignore_eos=True),
            max_tokens=3,
            arrived_at=0.0,
            images=image,
        )
    )
    core.add(request)
    return request


def inputs(core: EngineCore) -> dict[str, npt.NDArray[np.generic]]:
    planned = next(step for _ in range(20) if (step := core._plan(0.0)))
    flight = core._submit(planned)
    assert flight is not None
    core._commit(flight)
    return dict(flight.batch.inputs)


def test_chunks_that_cut_an_image_have_its_rows(core: EngineCore, images: FakeImages) -> None:
    add(core, "cut", lead=3)
    first, second = inputs(core), inputs(core)
    assert first["image_rows"].tolist() == [0] * 3 + [1] * 5
    assert second["image_rows"].tolist() == [1] * 3 + [0] * 2
    found = np.concatenate([first["image_features"][3:, 0], second["image_features"][:3, 0]])
    np.testing.assert_allclose(found, 5 + np.arange(8) / 100, rtol=1e-6)
    assert second["image_deepstack"].shape == (5, 2, 4)
    assert len(images.encoded) == 1, "an image is held from its first row to its last"
    assert set(inputs(core)) == {"position_t", "position_h", "position_w"}, "a decode has positions alone"


def test_images_do_not_shift_text_positions(core: EngineCore, images: FakeImages) -> None:
    images.advance(PromptImage(1, 2, 4, b"\5" * 32, b""))
    add(core, "text", lead=2, tail=1, picture=None)
    add(core, "picture", lead=1, tail=1)
    step = inputs(core)
    axes = np.stack([step[name] for name in ("position_t", "position_h", "position_w")])
    assert axes[:, :3].tolist() == [[0, 1, 2]] * 3
    assert axes[:, 3:].tolist() == [[0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 1, 2, 3, 4]]


def test_steps_without_images_have_no_inputs(core: EngineCore) -> None:
    request = add(core, "picture")
    while request.finish_reason is None:
        core.step()
    assert not core._parts.live
    add(core, "text", picture=None)
    assert not inputs(core)


def test_a_cached_image_is_not_encoded_again(core: EngineCore, images: FakeImages) -> None:
    for name, picture in (("a", b"\5"), ("b", b"\5"), ("c", b"\6")):
        request = add(core, name, lead=4, tail=6, picture=picture * 32)
        while request.finish_reason is None:
            core.step()
    assert images.encoded == [b"\5" * 32, b"\6" * 32]


def test_positions_are_those_of_m_rope() -> None:
    axes = Axes(14, (PromptImage(2, 2, 3, b"", b""), PromptImage(10, 1, 2, b"", b"")))
    wanted = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 7, 9, 10, 11],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 7, 9, 10, 11],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
    ]
    assert axes.of(0, 15).tolist() == wanted
    parts: list[Ints] = [axes.of(start, start + 5) for start in (0, 5, 10)]
    assert np.concatenate(parts, axis=1).tolist() == wanted
    assert Axes(3, (PromptImage(1, 1, 2, b"", b""),)).of(3, 4).tolist() == [[3]] * 3, (
        "an image ends the prompt"
    )
