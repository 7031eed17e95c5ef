"""The same prompt in vLLM's KVCacheManager, for ``octavo bench scheduler``, where vLLM is installed.

One group of full attention with prefix caching, its default hash (SHA-256), and the calls that its
scheduler makes for a request which fits into one step.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 16  # of the answer, which is never generated


@dataclass(frozen=True, slots=True)
class Missing:
    """Why there is nothing to compare with."""

    reason: str


class VllmPrompts:
    """A pool of vLLM's own; ImportError, AttributeError or TypeError: another vLLM than was written for.

    num_pages    of ``page_size`` tokens, as in the pool it is compared with
    max_tokens   of the longest prompt
    """

    def __init__(self, num_pages: int, page_size: int, *, max_tokens: int) -> None:
        core = importlib.import_module("vllm.v1.core.kv_cache_utils")
        hash_fn = importlib.import_module("vllm.utils.hashing").sha256
        self.version: str = importlib.import_module("vllm").__version__
        self._request: Any = importlib.import_module("vllm.v1.request").Request
        sampling = importlib.import_module("vllm.sampling_params").SamplingParams
        core.init_none_hash(hash_fn)
        self._hasher: Any = core.get_request_block_hasher(page_size, hash_fn)
        self._sampling: Any = sampling(max_tokens=MAX_TOKENS, temperature=0.0)
        self.num_found = 0  # tokens that the last prompt found
        self._manager = _manager(num_pages, page_size, max_tokens + MAX_TOKENS)

    def serve(self, prompt: list[int]) -> float:
        """Seconds from hashing the prompt to the last page given back."""
        manager = self._manager
        began = time.perf_counter()
        request = self._request("prompt", prompt, self._sampling, None, block_hasher=self._hasher)
        found, num_found, *_ = manager.get_computed_blocks(request)
        blocks = manager.allocate_slots(request, len(prompt) - num_found, num_found, found)
        manager.free(request)
        seconds = time.perf_counter() - began
        assert blocks is not None, "the pool has room for two such prompts"
        self.num_found = num_found
        return seconds


def open_vllm(num_pages: int, page_size: int, *, max_tokens: int) -> VllmPrompts | Missing:
    """vLLM's block manager, or why there is none."""
    try:
        return VllmPrompts(num_pages, page_size, max_tokens=max_tokens)
    except ImportError as error:
        return Missing(f"vLLM cannot be imported: {error}")
    except (AttributeError, TypeError) as error:
        return Missing(f"this vLLM has another interface than 0.32: {error}")


def _manager(num_pages: int, page_size: int, max_model_len: int) -> Any:
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    manager = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
    dtype = importlib.import_module("torch").float16
    spec = interface.FullAttentionSpec(block_size=page_size, num_kv_heads=1, head_size=1, dtype=dtype)
    config = interface.KVCacheConfig(
        num_blocks=num_pages + 1,  # one of them is never given out
        kv_cache_tensors=[],
        kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
    )
    return manager(
        config, max_model_len, scheduler_block_size=page_size, hash_block_size=page_size, enable_caching=True
    )
