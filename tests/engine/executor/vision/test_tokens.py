from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="pip install '.[vision]'")

import tiny_vlm
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.api.stats import Observer, StepRecord
from octavo.engine.core.build import build_core
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.executor.vision.encoder import ImageEncoder
from octavo.engine.executor.vision.families import read_rules, tensors_of
from octavo.engine.frontend.llm import LLM
from octavo.engine.memory.model_files import read_config
from octavo.engine.speculation import drafting
from octavo.engine.vision.reader import PictureReader
from tiny_vlm import Answer, Asked

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:At least one mel filter"),  # of Gemma 4's audio
]

COUNT = 20
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "lfm2-vl")
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
TIE = 3e-3  # logits closer than this may change places, because pages have 16 bits
TIE_BF16 = 0.2  # TIE for a vision part in bfloat16


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


@pytest.fixture(scope="module")
def ask() -> Iterator[tiny_vlm.Ask]:
    with tiny_vlm.mlx_vlm() as ask:
        yield ask


@pytest.fixture(scope="module")
def cases(ask: tiny_vlm.Ask, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return cache(lambda name: make_case(ask, name, tmp_path_factory.mktemp("vlm")))


@pytest.fixture(params=list(tiny_vlm.CONFIGS))
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


def make_case(ask: tiny_vlm.Ask, name: str, folder: Path, *, dtype: mx.Dtype = mx.float32) -> Case:
    side = tiny_vlm.SIDE[name]
    model = tiny_vlm.make_vlm(folder / name, name, dtype=dtype, language=mx.float32)
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
    return Case(model, work, ask(model, work, COUNT))


def generate(llm: LLM, work: list[Asked], params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate([asked.messages for asked in work], params, progress=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def check(outputs: list[Any], wanted: list[Answer], *, tie: float = TIE) -> int:
    """Compare tokens up to the first difference, which must be a tie; return the number of equal tokens."""
    equal = 0
    for found, answer in zip(tokens(outputs), wanted, strict=True):
        pairs = zip(found, answer.tokens, strict=True)
        count = next((i for i, (one, other) in enumerate(pairs) if one != other), COUNT)
        assert count == COUNT or answer.margins[count] < tie
        equal += count
    return equal


class Seen:
    """Events of an engine, by the option that must cause them."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("num_pages", "speculate", "async_steps"), 0)

    def core(self, config: EngineConfig, _: Observer | None) -> EngineCore:
        core: Any = build_core(config, self)
        submit_ahead = core._submit_ahead

        def count_steps_ahead(flight: Any) -> Any:
            ahead = submit_ahead(flight)
            self.counts["async_steps"] += ahead is not None
            return ahead

        core._submit_ahead = count_steps_ahead
        made: EngineCore = core
        return made

    def step(self, record: StepRecord) -> None:
        self.counts["num_pages"] += record.preemptions
        self.counts["speculate"] += sum(each.num_accepted for each in record.drafts)

    def rejected(self, reason: str) -> None:
        raise AssertionError(reason)


def slow_but(names: Iterable[str], *usual: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in usual else pytest.mark.slow) for name in names]


CHANGES: tuple[dict[str, Any], ...] = (
    {"max_step_tokens": 512},
    {"speculate": "draft:", "max_step_tokens": 64},
    {"async_steps": True},
    {"num_pages": 10},
    {"backend": "reference"},
)


@pytest.mark.parametrize(
    ("case", "is_changed"),
    [(name, is_changed) for is_changed in (False, True) for name in tiny_vlm.CONFIGS],
    indirect=["case"],
)
@pytest.mark.few(10)  # of each way and each of CHANGES
def test_a_mixed_batch_has_the_tokens_of_mlx_vlm(
    case: Case, is_changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen()
    number = list(tiny_vlm.CONFIGS).index(case.model.name)
    changes = CHANGES[number % len(CHANGES)] if is_changed else {}
    if "speculate" in changes:  # a draft model sees placeholders instead of images
        changes = changes | {"speculate": f"draft:{case.model}"}
        monkeypatch.setattr(drafting, "num_drafts", lambda *_, max_drafts, **__: max_drafts)
    with LLM(case.config(**changes), core_factory=seen.core) as llm:
        outputs = generate(llm, case.work)
        assert check(outputs, case.wanted) > 6 * COUNT
    assert case.wanted[1] != case.wanted[2], "pictures change nothing"
    is_hybrid = case.family in HYBRIDS  # a hybrid's steps never overlap
    assert all(seen.counts.get(option) != 0 or (option == "async_steps" and is_hybrid) for option in changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny_vlm.CONFIGS)
def test_vision_parts_in_bfloat16_give_the_tokens_of_mlx_vlm(
    ask: tiny_vlm.Ask, name: str, tmp_path: Path
) -> None:
    case = make_case(ask, name, tmp_path, dtype=mx.bfloat16)
    with LLM(case.config()) as llm:
        outputs = generate(llm, case.work)
    assert check(outputs, case.wanted, tie=TIE_BF16) > 2 * COUNT


@pytest.mark.parametrize(
    "case", slow_but(tiny_vlm.CONFIGS, "qwen3_vl", "pixtral", "gemma3", "lfm2-vl"), indirect=True
)
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
        assert again.cached_tokens >= whole or case.family in HYBRIDS
        assert encoder.num_encoded == 2
        kinds = {type(module).__name__ for module in encoder._tower.model.modules()}
        assert "NativeLinear" in kinds
        assert "Linear" not in kinds


@pytest.mark.parametrize(
    "case",
    slow_but(["qwen3_vl", "qwen3_5", "pixtral", "gemma3", "lfm2-vl"], "qwen3_vl", "qwen3_5", "gemma3"),
    indirect=True,
)
def test_a_prompt_has_bit_identical_results_alone_and_in_a_batch(case: Case) -> None:
    params = replace(GREEDY, logprobs=2)
    with LLM(case.config(prefix_cache=False)) as llm:
        together = generate(llm, case.work, params)
        alone = [generate(llm, [asked], params)[0] for asked in case.work]
    for one, all_ in zip(alone, together, strict=True):
        assert one.outputs[0].logprobs == all_.outputs[0].logprobs


@pytest.mark.few(5)
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


@pytest.mark.parametrize("case", ["qwen3_vl", "gemma3"], indirect=True)
def test_placeholders_without_images_are_refused(case: Case) -> None:
    placeholder = tiny_vlm.placeholder(case.family)
    with LLM(case.config()) as llm:
        for prompt in ([1, tiny_vlm.IMAGE, 2], f"a {placeholder} b"):
            with pytest.raises(InvalidRequest, match="must have a placeholder"):
                llm.generate(prompt, GREEDY, progress=False)
        with pytest.raises(InvalidRequest, match="for each of its 1 images, got 2"):
            generate(llm, [Asked((tiny_vlm.picture(1, 64, 64), placeholder))])
        check(generate(llm, case.work[1:2]), case.wanted[1:2])
