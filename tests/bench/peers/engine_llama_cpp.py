"""llama.cpp, driven through llama-cpp-python's C functions and scheduled like llama.cpp's server.

Each step has one token of each decoding sequence, then prompt tokens up to its budget."""

from __future__ import annotations

import argparse
import ctypes
import importlib
from dataclasses import dataclass, field
from typing import Any

KV_TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8}  # ggml's type numbers


@dataclass(slots=True)
class Sequence:
    backlog: list[int]
    left: int
    written: int = 0
    row: int = field(default=-1, init=False)


class LlamaCppEngine:
    name = "llama.cpp"

    def __init__(self, args: argparse.Namespace) -> None:
        self._lib: Any = importlib.import_module("llama_cpp")
        lib = self._lib
        lib.llama_backend_init()
        lib.llama_log_set(_NO_LOG, ctypes.c_void_p(0))
        self._model = lib.llama_model_load_from_file(args.model.encode(), lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {args.model}")
        params = lib.llama_context_default_params()
        params.n_ctx = args.sequences * args.context
        params.n_batch = params.n_ubatch = args.step_tokens
        params.n_seq_max = args.sequences
        params.n_threads = params.n_threads_batch = args.threads
        params.kv_unified = True
        kv_format = args.kv_format or "f16"
        params.type_k = params.type_v = KV_TYPES[kv_format]
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context of this size")
        self._sampler = lib.llama_sampler_init_greedy()
        self._batch = lib.llama_batch_init(args.step_tokens, 0, 1)
        self._budget = args.step_tokens
        self._sequences: dict[int, Sequence] = {}
        self._free = list(range(args.sequences))
        self.settings = f"{args.model}, {kv_format} KV, {args.threads} threads, {lib.__version__}"

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        self._sequences[self._free.pop()] = Sequence(list(prompt), max_tokens)

    def step(self) -> int:
        decoding = [item for item in self._sequences.items() if item[1].written and len(item[1].backlog) == 1]
        prompts = [item for item in self._sequences.items() if item not in decoding]
        self._batch.n_tokens = 0
        for index, sequence in decoding + prompts:
            self._fill(index, sequence)
        if self._batch.n_tokens == 0:
            return 0
        if status := self._lib.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode failed with {status}")
        return sum(self._sample(index) for index in list(self._sequences))

    def _fill(self, index: int, sequence: Sequence) -> None:
        batch = self._batch
        count = min(len(sequence.backlog), self._budget - batch.n_tokens)
        sequence.row = -1
        for token in sequence.backlog[:count]:
            at = batch.n_tokens
            batch.token[at], batch.pos[at] = token, sequence.written
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, index, False
            batch.n_tokens += 1
            sequence.written += 1
        del sequence.backlog[:count]
        if count and not sequence.backlog:
            sequence.row = batch.n_tokens - 1
            batch.logits[sequence.row] = True

    def _sample(self, index: int) -> int:
        sequence = self._sequences[index]
        if sequence.row < 0:
            return 0
        token = self._lib.llama_sampler_sample(self._sampler, self._context, sequence.row)
        sequence.backlog.append(token)
        sequence.left -= 1
        sequence.row = -1
        if sequence.left == 0:
            self._drop(index)
        return 1

    def _drop(self, index: int) -> None:
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_seq_rm(memory, index, -1, -1)
        del self._sequences[index]
        self._free.append(index)

    def clear(self) -> None:
        for index in list(self._sequences):
            self._drop(index)

    @property
    def busy(self) -> bool:
        return bool(self._sequences)


_NO_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


def load(args: argparse.Namespace) -> LlamaCppEngine:
    return LlamaCppEngine(args)
