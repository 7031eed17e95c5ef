from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("mlx_vlm", reason="pip install '.[vision]'")

import tiny_vlm
from fake_images import data_url
from octavo.engine import LLM, EngineConfig, SamplingParams
from router import http_server, needs_router, openai_client
from tiny_vlm import Asked

pytestmark = pytest.mark.server


@needs_router
@pytest.mark.parametrize(
    "family", ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4", "smolvlm"))]
)
async def test_an_image_gives_the_text_that_the_model_gives_alone(family: str, tmp_path: Path) -> None:
    model = tiny_vlm.make_vlm(tmp_path / f"{family}-tiny", family)
    red, other = (tiny_vlm.picture(seed, 192, 128) for seed in (1, 2))
    work = [(red,), (red,), (other,), (red, other)]
    flags = ["--num-pages", "100", "--page-size", "16", "--exact"]
    found = []
    async with (
        http_server("--", "--model", str(model), "--vision", *flags) as ready,
        openai_client(ready) as client,
    ):
        for files in work:
            parts = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
            answer = await client.chat.completions.create(
                model=ready["model"],
                messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "hi"}]}],
                max_tokens=8,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            details = answer.usage.prompt_tokens_details
            found.append((answer.choices[0].message.content, details.cached_tokens if details else 0))
    config = EngineConfig(model=str(model), vision=True, num_pages=100, page_size=16, exact=True)
    with LLM(config) as llm:
        asked = [Asked((*files, "hi")).messages for files in work]
        alone = llm.generate(asked, SamplingParams(max_tokens=8, ignore_eos=True), progress=False)
    assert [without_special(text or "") for text, _ in found] == [each.outputs[0].text for each in alone]
    assert [cached > 0 for _, cached in found] == [False, True, False, True]


def without_special(text: str) -> str:
    return re.sub("|".join(map(re.escape, tiny_vlm.SPECIAL)), "", text)
