from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="pip install '.[vision]'")

import tiny_vlm
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import Observer
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.executor.vision.encoder import ImageEncoder
from octavo.engine.executor.vision.families import read_rules, tensors_of
from octavo.engine.frontend.llm import LLM
from octavo.engine.memory.model_files import read_config
from octavo.engine.vision.reader import PictureReader
from tiny_vlm import Answer, Asked

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:At least one mel filter"),  # of Gemma 4's audio
]

COUNT = 16
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
TIE = 1e-3  # logits closer than this may be rounded either way


@dataclass(frozen=True)
class Case:
    model: Path
    work: list[Asked]
    wanted: list[Answer]

    @property
    def family(self) -> str:
        return self.model.name.removesuffix("_whole")

    def config(self, **changes: Any) -> EngineConfig:
        plain = EngineConfig(
            model=str(self.model), vision=True, page_size=16, kv_format="fp16", num_pages=300,
            max_step_tokens=10, max_running=8, exact=True,
        )  # fmt: skip
        return replace(plain, **changes)


@pytest.fixture(scope="module", params=list(tiny_vlm.CONFIGS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, side = request.param, tiny_vlm.SIDE[request.param]
    model = tiny_vlm.make_vlm(tmp_path_factory.mktemp("vlm") / name, name)
    wide, square, other = (
        tiny_vlm.picture(seed, columns * side, 4 * side) for seed, columns in ((1, 6), (2, 4), (3, 6))
    )
    work = [
        Asked(("hello world",)),
        Asked(("w", wide, "is this")),
        Asked(("w", other, "is this")),
        Asked((square, "and then some more text to read", wide, "x")),
        Asked(("t" * 70, square)),
        Asked((wide, wide, other, "zzz")),
        Asked(("w", wide, "or that")),  # Gemma's image ends in the page where the text differs
    ]
    return Case(model, work, tiny_vlm.tokens_of_mlx_vlm(model, work, COUNT))


def generate(llm: LLM, work: list[Asked], params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate([asked.messages for asked in work], params, progress=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def check(outputs: list[Any], wanted: list[Answer]) -> None:
    for found, answer in zip(tokens(outputs), wanted, strict=True):
        count = next((i for i, margin in enumerate(answer.margins) if margin < TIE), COUNT)
        assert found[:count] == answer.tokens[:count]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_step_tokens": 512},
        {"speculate": "ngram"},
        {"async_steps": True},
        {"num_pages": 12},
        {"backend": "reference"},
    ],
    ids=lambda changes: next(iter(changes), "native"),
)
def test_a_mixed_batch_has_the_tokens_of_mlx_vlm(case: Case, changes: dict[str, Any]) -> None:
    with LLM(case.config(**changes)) as llm:
        outputs = generate(llm, case.work)
        check(outputs, case.wanted)
    pictures = case.wanted[1:3]
    assert pictures[0] != pictures[1], "pictures change nothing"


def test_a_cached_prefix_ends_before_a_different_image(case: Case) -> None:
    cores: list[EngineCore] = []

    def make(config: EngineConfig, observer: Observer | None) -> EngineCore:
        cores.append(build_core(config, observer))
        return cores[0]

    with LLM(case.config(), core_factory=make) as llm:
        encoder = cores[0]._runner.images
        assert isinstance(encoder, ImageEncoder)
        (first,) = generate(llm, case.work[1:2])
        (other,) = generate(llm, case.work[2:3])
        again, shared = (generate(llm, [case.work[i]])[0] for i in (1, 6))
        check([first, other, again, shared], [case.wanted[i] for i in (1, 2, 1, 6)])
        assert other.cached_tokens <= len("?user\nw?")  # tokens before the image
        whole = (first.prompt_tokens - 1) // 16 * 16
        assert again.cached_tokens >= whole or case.family in ("qwen3_5", "lfm2-vl")
        assert encoder.num_encoded == 2
        kinds = {type(module).__name__ for module in encoder._tower.model.modules()}
        assert "NativeLinear" in kinds
        assert "Linear" not in kinds


def test_a_prompt_has_bit_identical_results_alone_and_in_a_batch(case: Case) -> None:
    params = replace(GREEDY, logprobs=2)
    with LLM(case.config(prefix_cache=False)) as llm:
        together = generate(llm, case.work, params)
        alone = [generate(llm, [asked], params)[0] for asked in case.work]
    for one, all_ in zip(alone, together, strict=True):
        assert one.outputs[0].logprobs == all_.outputs[0].logprobs


def test_pixels_are_prepared_as_by_mlx_vlm(case: Case) -> None:
    from mlx_vlm.utils import load_processor
    from PIL import Image

    rules = read_rules(case.model, read_config(case.model), max_pixels=2**20)
    processor = load_processor(case.model, False).image_processor
    reader = PictureReader(rules)
    file = case.model / "odd.png"
    file.write_bytes(tiny_vlm.picture(5, 200, 136))  # not a multiple of the patch size
    try:
        found = reader.read(file.read_bytes())
    finally:
        reader.close()
    pixels = np.frombuffer(found.pixels, np.uint8).reshape(
        found.rows * rules.side, found.columns * rules.side, 3
    )
    merged = {"patch_size": rules.side} if case.family == "mistral3" else {}
    wanted = processor(images=[Image.open(file)], **merged)
    values, tensors = tensors_of(case.family, rules, pixels)
    for name, made in {"pixel_values": values, **tensors}.items():
        if name in wanted:  # LFM2-VL's processor adds padding
            padded = np.ravel(wanted[name])[: np.size(made)]
            np.testing.assert_allclose(np.ravel(made), padded, rtol=0, atol=1e-6)


def test_placeholders_without_images_are_refused(case: Case) -> None:
    placeholder = tiny_vlm.placeholder(case.family)
    with LLM(case.config()) as llm:
        for prompt in ([1, tiny_vlm.IMAGE, 2], f"a {placeholder} b"):
            with pytest.raises(InvalidRequest, match="must have a placeholder"):
                llm.generate(prompt, GREEDY, progress=False)
        with pytest.raises(InvalidRequest, match="for each of its 1 images, got 2"):
            generate(llm, [Asked((tiny_vlm.picture(1, 64, 64), placeholder))])
        check(generate(llm, case.work[1:2]), case.wanted[1:2])
