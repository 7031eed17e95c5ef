from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

import tiny_models
from native import require_extension
from octavo.engine.executor.load.loader import load_model, materialize
from octavo.engine.executor.native.model_ops import NativeOps

pytestmark = pytest.mark.parity

_ext = require_extension()

TENSORS = {
    "bf16": mx.random.normal((5, 64)).astype(mx.bfloat16),
    "fp16": mx.random.normal((3, 1, 7)).astype(mx.float16),
    "fp32": mx.random.normal((9,)),
    "codes": mx.arange(24, dtype=mx.uint32).reshape(2, 12),
    "bytes": mx.arange(11, dtype=mx.uint8),
    "scalar": mx.array(3.5),
}


def test_mapped_arrays_are_those_of_the_file(tmp_path: Path) -> None:
    from octavo.engine.executor.native.model_ops import map_safetensors

    file = tmp_path / "model.safetensors"
    mx.save_safetensors(str(file), TENSORS, metadata={"format": "mlx"})
    mapped = map_safetensors(file)
    assert mapped is not None
    assert mapped.keys() == TENSORS.keys()
    for name, wanted in TENSORS.items():
        assert (mapped[name].shape, mapped[name].dtype) == (wanted.shape, wanted.dtype)
        assert mx.array_equal(mapped[name], wanted)
        assert mx.array_equal(_ext.copy_of(mapped[name]), wanted)


def test_packing_reads_from_the_file_and_copies_nothing_first(tmp_path: Path) -> None:
    from octavo.engine.executor.native.model_ops import map_safetensors

    file = tmp_path / "model.safetensors"
    weight = mx.random.normal((512, 1024)).astype(mx.bfloat16)
    mx.save_safetensors(str(file), {"a": mx.full((1024,), 3e30, mx.float32), "b": weight})
    mapped = map_safetensors(file)
    assert mapped is not None
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    packed = _ext.pack_dense(mapped["b"])
    assert mx.get_peak_memory() - before < weight.nbytes // 2
    assert mx.array_equal(_ext.unpack(packed)[0], weight)


def test_files_with_empty_arrays_are_left_to_mlx(tmp_path: Path) -> None:
    from octavo.engine.executor.native.model_ops import map_safetensors

    file = tmp_path / "model.safetensors"
    mx.save_safetensors(str(file), {"empty": mx.zeros((0, 4)), "a": mx.zeros(3)})
    assert map_safetensors(file) is None


def test_arrays_outside_of_a_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(64))
    mapped = _ext.MappedFile(str(file))
    assert mapped.view(8, [14], mx.float32).sum().item() == 0
    for offset, count in ((0, 1), (8, 15), (72, 1), (-8, 1)):
        with pytest.raises(ValueError, match="is not inside"):
            mapped.view(offset, [count], mx.float32)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(RuntimeError, match="cannot be mapped"):
            _ext.MappedFile(str(missing))


def parameters(model: Module) -> list[tuple[str, mx.array]]:
    return list(dict(tree_flatten(model.parameters())).items())


def test_a_model_that_was_loaded_no_longer_needs_its_file(tmp_path: Path) -> None:
    folder = tiny_models.make_model(tmp_path / "model", "llama")
    loaded = load_model(folder, weights="keep", ops=NativeOps())
    materialize(loaded.model, NativeOps(), exact=False, fuse=False)
    before = {name: np.array(a.astype(mx.float32)) for name, a in parameters(loaded.model)}
    for file in folder.glob("*.safetensors"):
        size = file.stat().st_size
        with file.open("r+b") as stream:
            stream.write(bytes(size))
    for name, array in parameters(loaded.model):
        np.testing.assert_array_equal(np.array(array.astype(mx.float32)), before[name])
    assert any(values.any() for values in before.values())


PEAK = """
import sys, time
import octavo.engine.executor.load.load
from octavo.engine.api.config import EngineConfig
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.build import build_core
from octavo.engine.core.request import Request
def peak():
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
before = peak()
core = build_core(EngineConfig(model=sys.argv[1], backend="cpu", num_pages=40, max_running=2, page_size=32))
loaded = peak() - before
for length in (60, 200, 512, 500):
    core.add(
        Request(
            str(length),
            list(range(length)),
            SamplingParams(max_tokens=3, ignore_eos=True),
            max_tokens=3,
            tokenizer=core.tokenizer,
            vocab_size=core.info.vocab_size,
            arrived_at=time.monotonic(),
        )
    )
    while core.has_work:
        core.step()
print(loaded, peak() - before, core.info.memory.weights, core.info.memory.pages)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process")
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer keeps freed memory")
def test_neither_loading_nor_prompts_take_much_beside_weights_and_pages(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "head_dim": 64}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 1024}
    folder = tiny_models.make_model(tmp_path / "model", "llama", dtype=mx.bfloat16, **sizes, **heads)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder)], capture_output=True, text=True, check=True
    )
    loaded, served, weights, pages = map(int, done.stdout.split())
    assert weights > 150 * 2**20
    assert 0.9 * weights < loaded < 1.5 * weights, f"{loaded / weights:.2f} times the weights"
    assert served < 1.4 * (weights + pages), f"{served / (weights + pages):.2f} times weights and pages"
