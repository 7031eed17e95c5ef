"""Configuration of a draft model, derived from its target's configuration."""

from __future__ import annotations

from dataclasses import replace

from ..api.config import EngineConfig


def draft_config(config: EngineConfig, *, num_pages: int) -> EngineConfig:
    assert config.draft_model is not None
    return replace(
        config.without_residual(),
        model=config.draft_model,
        revision=None,
        speculate="off",
        num_pages=num_pages,
        kv_memory=None,
        max_model_len=None,
        max_pinned_pages=0,
        state_memory=None,
        served_model_name=(),
        chat_template=None,
        cache_dir=None,
        cache_dir_bytes=None,
        remote_cache=None,
        save_dir=None,
    )
