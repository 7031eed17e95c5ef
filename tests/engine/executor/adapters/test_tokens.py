from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import tiny_adapters
import tiny_models
from native import require_extension
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.errors import InvalidConfig, InvalidRequest, NotFound
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.frontend.llm import LLM

pytestmark = pytest.mark.parity

COUNT = 16
PROMPTS = [[(7 * i + 3 * j + 11) % 300 for j in range(n)] for i, n in enumerate((5, 40, 23, 75))]
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
ARCHITECTURES = {
    "qwen3": tiny_adapters.DENSE,  # merged matrices, DoRA and PEFT files
    "qwen3_4bit": tiny_adapters.DENSE,
    "qwen3_moe": tiny_adapters.SWITCH,  # a mixture of experts with an adapted router
    "qwen3_5": tiny_adapters.MIXER,  # a hybrid with gated delta layers
    "gemma3_text": tiny_adapters.DENSE,  # sliding windows
}


@dataclass(frozen=True)
class Case:
    name: str
    model: Path
    adapters: dict[str, Path]
    work: list[tuple[list[int], str | None]]
    wanted: list[list[int]]

    def config(self, **changes: Any) -> EngineConfig:
        plain = EngineConfig(
            model=str(self.model), page_size=16, kv_format="fp16", num_pages=300, max_step_tokens=64,
            max_running=32, lora_modules=tuple(f"{name}={path}" for name, path in self.adapters.items()),
        )  # fmt: skip
        return replace(plain, **changes)


def make_case(root: Path, name: str) -> tuple[Case, list[dict[str, Any]]]:
    """Return a case without its tokens, and the jobs of mlx-lm that compute them."""
    changes: dict[str, Any] = {"text_config": tiny_adapters.HYBRID} if name == "qwen3_5" else {}
    model = tiny_models.make_model(root / name, name.removesuffix("_4bit"), dtype=mx.float32, **changes)
    if name.endswith("_4bit"):
        model = tiny_adapters.quantize_folder(root / "quantized", model)
    keys = ARCHITECTURES[name]

    def make(title: str, **how: Any) -> Path:
        return tiny_adapters.make_adapter(root / f"{name}-{title}", model, **how)

    adapters = {
        "four": make("four", rank=4, scale=20.0, keys=keys, seed=4),
        "sixteen": make("sixteen", rank=16, scale=2.0, keys=keys, num_layers=2, seed=16),
    }
    if name.startswith("qwen3") and "moe" not in name and name != "qwen3_5":
        adapters["dora"] = make("dora", rank=8, scale=4.0, keys=keys, kind="dora", seed=5)
        adapters["peft"] = tiny_adapters.to_peft(root / f"{name}-peft", adapters["four"])
    names: list[str | None] = [None, *adapters]
    folders = [adapters["four" if each == "peft" else each] if each else None for each in names]
    jobs = [
        {"model": str(model), "adapter": folder and str(folder), "prompts": PROMPTS, "count": COUNT}
        for folder in folders
    ]
    return Case(name, model, adapters, [(prompt, each) for prompt in PROMPTS for each in names], []), jobs


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    require_extension()
    root = tmp_path_factory.mktemp("adapters")
    made = [make_case(root, name) for name in ARCHITECTURES]
    answers = iter(tiny_adapters.tokens_of_mlx_lm([job for _, jobs in made for job in jobs]))
    for case, jobs in made:
        by_prompt = zip(*(next(answers) for _ in jobs), strict=True)
        case.wanted.extend(tokens for each in by_prompt for tokens in each)
    return {case.name: case for case, _ in made}


@pytest.fixture(params=list(ARCHITECTURES))
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


def generate(llm: LLM, work: list[Any], params: SamplingParams = GREEDY) -> list[Any]:
    return llm.generate([p for p, _ in work], params, adapter=[name for _, name in work], progress=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": {"backend": "reference"},
    "qwen3_4bit": {"max_loras": 1},
    "qwen3_moe": {"speculate": "ngram"},
    "qwen3_5": {"async_steps": True},
    "gemma3_text": {"backend": "reference", "max_loras": 1},
}


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_mixed_batch_has_the_tokens_of_mlx_lm(case: Case, is_changed: bool) -> None:
    changes = CHANGES[case.name] if is_changed else {}
    # Quantized layers round activations unless exact; the reference, MLX, does not.
    with LLM(case.config(exact=True, **changes)) as llm:
        assert tokens(generate(llm, case.work)) == case.wanted
    assert len({tuple(each) for each in case.wanted[: len(case.adapters) + 1]}) >= 3, (
        "adapters change nothing"
    )


def test_bits_are_the_same_alone_and_in_a_batch(case: Case) -> None:
    params = replace(GREEDY, logprobs=2, max_tokens=6)
    with LLM(case.config(prefix_cache=False)) as llm:
        together = generate(llm, case.work, params)
        for output, each in zip(together, case.work, strict=True):
            (alone,) = generate(llm, [each], params)
            assert [e.logprob for e in output.outputs[0].logprobs] == [
                e.logprob for e in alone.outputs[0].logprobs
            ]


def test_base_rows_have_the_bits_of_an_engine_without_adapters(case: Case) -> None:
    params = replace(GREEDY, logprobs=2, max_tokens=6)
    with LLM(case.config(prefix_cache=False)) as llm:
        mixed = generate(llm, case.work, params)
    base = [(prompt, name) for prompt, name in case.work if name is None]
    with LLM(case.config(prefix_cache=False, lora_modules=())) as llm:
        plain = iter(generate(llm, base, params))
    for output, (_, name) in zip(mixed, case.work, strict=True):
        if name is None:
            wanted = next(plain).outputs[0].logprobs
            assert [e.logprob for e in output.outputs[0].logprobs] == [e.logprob for e in wanted]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Case:
    require_extension()
    root = tmp_path_factory.mktemp("dense")
    model = tiny_models.make_model(root / "model", "qwen3", dtype=mx.float32)
    names = ("one", "two")
    adapters = {name: tiny_adapters.make_adapter(root / name, model, seed=i) for i, name in enumerate(names)}
    return Case("dense", model, adapters, [], [])


def test_prefixes_are_kept_apart_by_adapter(dense: Case) -> None:
    prompt = list(range(1, 65))
    with LLM(dense.config()) as llm:
        found = [generate(llm, [(prompt, n)])[0].cached_tokens for n in ("one", "two", None, "one", None)]
    assert found == [0, 0, 0, 48, 48]


def test_a_replaced_adapter_finds_nothing_of_the_old_one(dense: Case) -> None:
    prompt = list(range(1, 65))
    with LLM(dense.config()) as llm:
        before = tokens(generate(llm, [(prompt, "one")]))
        llm.unload_adapter("one")
        with pytest.raises(NotFound, match="one"):
            generate(llm, [(prompt, "one")])
        llm.load_adapter("one", dense.adapters["two"])
        replaced = generate(llm, [(prompt, "one")])
        assert replaced[0].cached_tokens == 0
        assert tokens(replaced) == tokens(generate(llm, [(prompt, "two")])) != before
        llm.unload_adapter("one")
        llm.load_adapter("one", dense.adapters["one"])
        assert tokens(generate(llm, [(prompt, "one")])) == before


def test_parallel_samples_have_the_adapter_of_their_request(dense: Case) -> None:
    params = SamplingParams(max_tokens=8, temperature=1, seed=7, n=3, ignore_eos=True)
    with LLM(dense.config()) as llm:
        one, base = (generate(llm, [(PROMPTS[1], name)], params)[0] for name in ("one", None))
        wanted = [generate(llm, [(PROMPTS[1], "one")], replace(params, n=1, seed=7 + i))[0] for i in range(3)]
    assert [o.token_ids for o in one.outputs] == [o.outputs[0].token_ids for o in wanted]
    assert [o.token_ids for o in one.outputs] != [o.token_ids for o in base.outputs]


def test_a_load_drops_no_captured_step(dense: Case) -> None:
    with LLM(dense.config(lora_modules=(), lora_memory=1 << 24)) as llm:
        llm.load_adapter("one", dense.adapters["one"])
        generate(llm, [(PROMPTS[0], "one")])
        runner = llm._thread._core._runner._model.graph_runner  # type: ignore[union-attr]
        captured = set(runner._captured)
        llm.load_adapter("two", dense.adapters["two"])
        generate(llm, [(PROMPTS[0], "two")])
        assert set(runner._captured) == captured


@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model.", ""])
def test_names_of_transformers_text_models_are_known(dense: Case, tmp_path: Path, root: str) -> None:
    peft = tiny_adapters.to_peft(tmp_path, dense.adapters["one"])
    file = peft / "adapter_model.safetensors"
    weights: Any = mx.load(str(file))
    named = {name.replace("model.layers", f"{root}layers"): each for name, each in weights.items()}
    assert not set(named) & set(weights)
    mx.save_safetensors(str(file), named)
    with LLM(dense.config(lora_modules=(*dense.config().lora_modules, f"peft={peft}"))) as llm:
        one, other = tokens(generate(llm, [(PROMPTS[0], "one"), (PROMPTS[0], "peft")]))
    assert one == other


def test_an_adapter_has_not_the_models_name(dense: Case) -> None:
    modules = (f"tiny={dense.adapters['one']}",)
    with pytest.raises(InvalidConfig, match="must differ from the model's name, got 'tiny'"):
        LLM(dense.config(served_model_name=("base", "tiny"), lora_modules=modules))


def test_an_adapter_that_cannot_be_served_changes_nothing(dense: Case, tmp_path: Path) -> None:
    wide = tiny_models.make_model(tmp_path / "wide", "qwen3", dtype=mx.float32, intermediate_size=192)
    other = tiny_adapters.make_adapter(tmp_path / "other", wide)
    with LLM(dense.config(max_lora_rank=4)) as llm:
        before = tokens(generate(llm, [(PROMPTS[0], "one")]))
        with pytest.raises(InvalidRequest, match="use an adapter of this model"):
            llm.load_adapter("other", other)
        big = tiny_adapters.make_adapter(tmp_path / "big", dense.model, rank=5)
        with pytest.raises(InvalidRequest, match=r"rank of .* at most 4, got 5"):
            llm.load_adapter("big", big)
        for layer in ("model.embed_tokens", "lm_head"):
            factors = {f"{layer}.lora_a": mx.ones((8, 2)), f"{layer}.lora_b": mx.ones((2, 8))}
            tiny_adapters.save(tmp_path / layer, factors, {"lora_parameters": {"scale": 1}})
            with pytest.raises(InvalidRequest, match=f"got {layer}; embeddings, output heads"):
                llm.load_adapter("other", tmp_path / layer)
        with pytest.raises(InvalidRequest, match="'one' twice"):
            llm.load_adapter("one", dense.adapters["two"])
        assert tokens(generate(llm, [(PROMPTS[0], "one")])) == before
