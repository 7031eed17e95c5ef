from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.engine.api.errors import InvalidConfig, ModelLoadError
from octavo.engine.memory import budget as memory
from octavo.kernels.interface import LayerSpec

GIB = 1024**3


@pytest.mark.parametrize(("activation_bytes", "measured"), [(2, 116.8), (4, 199.5)])
def test_encoding_bytes_cover_a_layers_memory(activation_bytes: int, measured: float) -> None:
    """Measured MiB are MLX's peak on a CPU, for one vision layer of Qwen3-VL and 512 x 512 pixels."""
    vision = {"hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "depth": 27}
    estimate = memory.encoding_bytes(
        {"vision_config": vision}, num_patches=1024, activation_bytes=activation_bytes
    )
    assert measured < estimate / 1024**2 < 1.5 * measured


def test_page_bytes_are_the_arithmetic_of_the_design() -> None:
    # 32 layers, 8 KV heads, D = 128, 4,096 positions, 16 bits: 512 MiB.
    layers = (LayerSpec(num_kv_heads=8, head_dim=128, value_dim=128),) * 32
    pages = 4096 // 32
    assert memory.page_bytes(layers, page_size=32, k_format="bf16", v_format="bf16") * pages == GIB // 2
    # fp4: 64 bytes of codes and 2 of scales, instead of 256 bytes.
    assert (
        memory.page_bytes(layers, page_size=32, k_format="fp4", v_format="fp4") * pages
        == GIB // 2 * 66 // 256
    )


def test_page_bytes_follow_each_layer_and_each_format() -> None:
    layers = (
        LayerSpec(num_kv_heads=1, head_dim=32, value_dim=64),
        LayerSpec(num_kv_heads=3, head_dim=16, value_dim=16),
    )
    k_bytes = 8 * (1 * 64 + 3 * 32)
    v_bytes = 8 * (1 * (32 + 2) + 3 * (8 + 2))
    assert memory.page_bytes(layers, page_size=8, k_format="bf16", v_format="fp4") == k_bytes + v_bytes


def test_a_format_that_cannot_hold_the_rows_is_a_clear_refusal() -> None:
    with pytest.raises(InvalidConfig, match="head_dim 12"):
        memory.page_bytes(
            [LayerSpec(num_kv_heads=1, head_dim=12, value_dim=12)],
            page_size=8,
            k_format="fp4",
            v_format="fp4",
        )


def write(file: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def test_weights_are_counted_from_headers(tmp_path: Path) -> None:
    tensor = {"dtype": "BF16", "shape": [3, 2], "data_offsets": [0, 12]}
    write(tmp_path / "model-00001-of-00002.safetensors", {"__metadata__": {"a": "b"}, "x": tensor}, bytes(12))
    write(tmp_path / "model-00002-of-00002.safetensors", {"y": tensor | {"data_offsets": [0, 12]}}, bytes(12))
    write(tmp_path / "other.safetensors", {"z": tensor}, bytes(12))
    assert memory.weights_bytes(tmp_path) == 24


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(9), "must be .* bytes long"),
        (b"not json", b"", "damaged"),
        ({"x": {"shape": [4]}}, b"", "damaged"),
        ([1, 2], b"", "damaged"),
    ],
)
def test_damaged_weights_are_refused_by_name(
    tmp_path: Path, header: object, data: bytes, message: str
) -> None:
    file = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ModelLoadError, match=message) as caught:
        memory.tensors_of(file)
    assert str(file) in str(caught.value)


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((10**9).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelLoadError, match="claims 1000000000 bytes, but the file has 10"):
        memory.tensors_of(file)
    file.write_bytes(b"\1")
    with pytest.raises(ModelLoadError, match="damaged"):
        memory.tensors_of(file)
