"""Conversion of a GGUF file to a model folder in the user's cache.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 become affine groups of 32 with equal values.
Other formats become 16-bit floats. Source of the layouts: ggml's ``ggml-common.h``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..api.errors import ModelLoadError
from .architectures import Architecture, Metadata, architecture_of, config_of, tensor_name
from .tokenizer import end_ids, settings_of, tokenizer_of

Array = npt.NDArray[Any]
GROUP_SIZE = 32
AFFINE = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}  # format -> bits


class Affine(NamedTuple):
    """Weight = scale * code + bias, a scale and a bias per 32 codes.

    weight  packed codes, uint32 [..., inputs * bits / 32]
    scales  float16 [..., inputs / 32]
    biases  float16 [..., inputs / 32]
    """

    weight: Array
    scales: Array
    biases: Array


def affine(kind: str, blocks: Array) -> Affine:
    """Return blocks, uint8 [..., bytes of a row], in affine format."""
    bits = AFFINE[kind]
    has_minimum, halves = kind.endswith("_1"), 2 if kind.endswith("_1") else 1
    size = 2 * halves + (4 if bits == 5 else 0) + (16 if bits < 8 else 32)
    rows = blocks.reshape(*blocks.shape[:-1], -1, size)
    floats = np.ascontiguousarray(rows[..., : 2 * halves]).view(np.float16)
    scales, rest = floats[..., 0], rows[..., 2 * halves :]
    if bits == 8:
        codes = (rest.view(np.int8).astype(np.int16) + 128).astype(np.uint8)
    else:
        low = rest[..., -16:]
        codes = np.concatenate((low & 15, low >> 4), axis=-1)
        if bits == 5:
            codes |= np.unpackbits(rest[..., :4], axis=-1, bitorder="little") << 4
    biases = floats[..., 1] if has_minimum else scales * np.float16(-(2 ** (bits - 1)))
    return Affine(_pack(codes, bits), scales, biases)


def _pack(codes: Array, bits: int) -> Array:
    """Return codes, uint8 [..., groups, 32], packed as uint32 [..., groups * bits]."""
    flat = codes.reshape(*codes.shape[:-2], -1)
    if bits == 8:
        return np.ascontiguousarray(flat).view("<u4")
    if bits == 4:
        return np.ascontiguousarray(flat[..., ::2] | flat[..., 1::2] << 4).view("<u4")
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    stream = stream.reshape(*codes.shape[:-1], GROUP_SIZE * bits)
    packed = np.packbits(stream, axis=-1, bitorder="little")
    return packed.reshape(*codes.shape[:-2], -1).view("<u4")


def is_exact(tensor: Affine) -> bool:
    return bool(np.isfinite(tensor.biases).all())


def deinterleaved(array: Array, num_heads: int) -> Array:
    """Return rows [heads * dim, ...] in mlx-lm's rotary order instead of llama.cpp's."""
    rows = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))


def as_dtype(array: Array, dtype: str) -> Array:
    """Return ``array`` as float16, or as bfloat16 bits rounded to nearest even."""
    if dtype == "float16":
        return array.astype(np.float16)
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


log = logging.getLogger(__name__)

_VERSION = 2
_SHARD = 1 << 30  # bytes per file of the converted model


def model_folder(file: Path) -> Path:
    """Return the folder of the converted model; convert the GGUF file at the first call.

    Folders lie under ``$XDG_CACHE_HOME/octavo/gguf`` (``~/.cache`` by default).
    Raises ModelLoadError if the file cannot be read or its model is not supported.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "gguf"
    facts = file.resolve(), file.stat().st_size, file.stat().st_mtime_ns, _VERSION
    folder = home / f"{file.stem}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    reader = _open(file)
    try:
        home.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=home, prefix=".new-"))
    except OSError as error:
        raise ModelLoadError(
            f"{home}, into which GGUF files are converted, cannot be written ({error.strerror}); set "
            "XDG_CACHE_HOME to a writable folder"
        ) from error
    try:
        _convert(reader, made)
        made.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise ModelLoadError(
                f"{file} cannot be converted into {home}: {error}; free space there"
            ) from error
    except ModelLoadError:
        raise
    except Exception as error:  # metadata may hold anything
        raise ModelLoadError(f"{file} cannot be converted ({error!r:.200}); download it again") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    log.info("%s: converted into %s; delete that folder to convert it again", file, folder)
    return folder


def _open(file: Path) -> Any:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except Exception as error:  # a damaged file may raise anything
        raise ModelLoadError(f"{file} is not a readable GGUF file ({error}); download it again") from error
    if reader.byte_order == "S":
        raise ModelLoadError(
            f"{file} must be {sys.byteorder}-endian like this machine, got the other byte order; convert it "
            f"with gguf-convert-endian {file} native"
        )
    return reader


def _convert(reader: Any, folder: Path) -> None:
    try:
        meta = Metadata({name: field.contents() for name, field in reader.fields.items()})
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()
        }
        ropes = {name: _floats(tensor) for name, tensor in tensors.items() if name.startswith("rope_")}
    except Exception as error:
        raise ModelLoadError(f"the GGUF file is damaged ({error}); download it again") from error
    if meta.get("split.count", 0) > 1:
        raise ModelLoadError(
            f"the model is split into {meta.get('split.count')} GGUF files; merge them with "
            "llama-gguf-split --merge"
        )
    architecture = architecture_of(meta)
    if "token_embd.weight" not in shapes:
        raise ModelLoadError("the GGUF file has no tensor token_embd.weight; give a file of a whole model")
    config, tokenizer = config_of(meta, ropes, shapes), tokenizer_of(meta)
    has_bf16 = any(tensor.tensor_type.name == "BF16" for tensor in tensors.values())
    dtype = "bfloat16" if has_bf16 else architecture.dtype
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    widths: dict[str, int | bool] = {}

    def arrays() -> Iterator[tuple[str, str, npt.NDArray[Any]]]:
        for name, tensor in tensors.items():
            if name in ropes:
                continue
            for named, array, bits in _arrays(tensor, architecture, heads, dtype):
                if bits is not None:
                    widths[named.removesuffix(".weight")] = bits
                yield (
                    (named, "uint32", array)
                    if array.dtype == np.uint32
                    else (named, dtype, as_dtype(array, dtype))
                )

    _write_shards(folder, arrays())
    config["torch_dtype"] = dtype
    if widths:
        usual = Counter(widths.values()).most_common(1)[0][0]
        others = {
            name: {"group_size": GROUP_SIZE, "bits": bits} for name, bits in widths.items() if bits != usual
        }
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": usual, **others}
    ends = end_ids(meta)
    for name, content in (
        ("config.json", {**config, "eos_token_id": ends}),
        ("generation_config.json", {"eos_token_id": ends}),
        ("tokenizer_config.json", settings_of(meta)),
    ):
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    kept = Counter(tensor.tensor_type.name for tensor in tensors.values())
    wide = {name: count for name, count in kept.items() if name not in (*AFFINE, "F32", "F16", "BF16")}
    if wide:
        log.warning(
            "MLX has no format like %s, so these tensors are stored in %s; --weights int8 or int4 makes them "
            "smaller",
            ", ".join(f"{name} ({count})" for name, count in sorted(wide.items())), dtype,
        )  # fmt: skip


def _arrays(
    tensor: Any, architecture: Architecture, heads: Mapping[str, int], dtype: str
) -> Iterator[tuple[str, npt.NDArray[Any], int | None]]:
    named, kind = tensor_name(architecture, tensor.name), tensor.tensor_type.name
    stem = tensor.name.split(".")[-2]
    num_heads = heads.get(stem) if architecture.permuted else None

    def placed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array if num_heads is None else deinterleaved(array, num_heads)

    if kind in AFFINE:
        packed = affine(kind, tensor.data)
        if is_exact(packed):
            base = named.removesuffix(".weight")
            yield named, placed(packed.weight), AFFINE[kind]
            yield f"{base}.scales", placed(packed.scales), None
            yield f"{base}.biases", placed(packed.biases), None
            return
    floats = placed(_floats(tensor))
    if architecture.norm_offset and stem.endswith("norm"):
        floats = floats - np.float32(architecture.norm_offset)
    if dtype == "float16" and np.abs(floats).max(initial=0.0) > np.finfo(np.float16).max:
        raise ModelLoadError(
            f"tensor {tensor.name!r} exceeds float16's range; give a folder of the model in safetensors"
        )
    yield named, floats, None


def _floats(tensor: Any) -> npt.NDArray[Any]:
    from gguf.quants import dequantize

    try:
        values: npt.NDArray[Any] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    except RuntimeError as error:
        raise ModelLoadError(
            f"tensor {tensor.name!r} has the unsupported type {tensor.tensor_type.name}; give a file in "
            "another quantization"
        ) from error
    return values.reshape([int(size) for size in reversed(tensor.shape)])


def _write_shards(folder: Path, arrays: Iterator[tuple[str, str, npt.NDArray[Any]]]) -> None:
    from safetensors import TensorSpec, serialize_file

    places: dict[str, str] = {}
    shard: dict[str, tuple[str, npt.NDArray[Any]]] = {}
    total = size = 0

    def write() -> None:
        name = f"model-{len(set(places.values())) + 1:05}.safetensors"
        specs = {
            key: TensorSpec(dtype=dtype, shape=data.shape, data_ptr=data.ctypes.data, data_len=data.nbytes)
            for key, (dtype, data) in shard.items()
        }
        serialize_file(specs, folder / name, {"format": "mlx"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, dtype, array in arrays:
        shard[name] = dtype, np.ascontiguousarray(array)
        total, size = total + array.nbytes, size + array.nbytes
        if size > _SHARD:
            write()
            size = 0
    if shard:
        write()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
