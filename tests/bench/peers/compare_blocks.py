"""Long prompts in Octavo's block manager and in vLLM's, alternating, in one environment.

    python tests/bench/peers/compare_blocks.py --repeats 20

vLLM 0.32 has one group of full attention and prefix caching with SHA-256.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from typing import Any

from octavo_lab.bench.scheduler import PAGE_SIZE, PROMPT_POOL, PROMPT_TOKENS, time_prompts

MAX_TOKENS = 16  # tokens of the answer, which is never generated


class VllmPrompts:
    def __init__(self, num_pages: int, page_size: int, *, max_tokens: int) -> None:
        core = importlib.import_module("vllm.v1.core.kv_cache_utils")
        hash_fn = importlib.import_module("vllm.utils.hashing").sha256
        self.version: str = importlib.import_module("vllm").__version__
        self._request: Any = importlib.import_module("vllm.v1.request").Request
        sampling = importlib.import_module("vllm.sampling_params").SamplingParams
        core.init_none_hash(hash_fn)
        self._hasher: Any = core.get_request_block_hasher(page_size, hash_fn)
        self._sampling: Any = sampling(max_tokens=MAX_TOKENS, temperature=0.0)
        self._manager = _manager(num_pages, page_size, max_tokens + MAX_TOKENS)

    def serve(self, prompt: list[int]) -> float:
        """Return the seconds from hashing the prompt to releasing its last page."""
        manager = self._manager
        began = time.perf_counter()
        request = self._request("prompt", prompt, self._sampling, None, block_hasher=self._hasher)
        found, num_found, *_ = manager.get_computed_blocks(request)
        blocks = manager.allocate_slots(request, len(prompt) - num_found, num_found, found)
        manager.free(request)
        seconds = time.perf_counter() - began
        assert blocks is not None, "the pool has room for two such prompts"
        return seconds


def _manager(num_pages: int, page_size: int, max_model_len: int) -> Any:
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    manager = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
    dtype = importlib.import_module("torch").float16
    spec = interface.FullAttentionSpec(block_size=page_size, num_kv_heads=1, head_size=1, dtype=dtype)
    config = interface.KVCacheConfig(
        num_blocks=num_pages + 1,  # vLLM reserves one block
        kv_cache_tensors=[],
        kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
    )
    return manager(
        config, max_model_len, scheduler_block_size=page_size, hash_block_size=page_size, enable_caching=True
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=20, help="prompts to time (20)")
    vllm = VllmPrompts(PROMPT_POOL, PAGE_SIZE, max_tokens=PROMPT_TOKENS)
    ours, theirs = time_prompts(parser.parse_args().repeats, vllm.serve)
    print(json.dumps({"octavo": ours.to_json(), "vllm": {"version": vllm.version, **theirs.to_json()}}))
