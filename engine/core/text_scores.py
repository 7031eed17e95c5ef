"""Scores of a short text, computed through a runner's pages, for comparing page formats."""

from __future__ import annotations

from ..api.outputs import TokenLogprob
from ..api.sampling_params import MAX_LOGPROBS, SamplingParams
from ..tokenizer.tokenizer import Tokenizer
from .engine_core import EngineCore
from .request import Request

TEXT = """The harbour was quiet when Ines opened the boat house. Her brother Tomas had left a note on the table:
"The red key is under the third stone, the blue key is in the tea tin." She read it twice, put on her coat and went
down to the water. Three boats lay at the pier. The first was called Marigold, the second Old Peter, and the third had
no name at all. Ines had promised to bring Marigold back to the village before noon, but the engine needed the red key,
and the rain had covered the stones with leaves. She counted them slowly: one, two, three. Under the third stone lay
the red key, wet and cold. "Thank you, Tomas," she said, and laughed. At eleven o'clock Marigold left the pier, passed
Old Peter and the boat without a name, and sailed out of the harbour. In the village Tomas was waiting. "Did you find
the red key?" he asked. "Under the third stone," said Ines, "as you wrote. And the blue key is still in the tea tin."
"""  # noqa: E501 - one paragraph


def text_ids(tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int) -> list[int]:
    """Return tokens of ``TEXT`` in the model's vocabulary, as many as fit into its length."""
    ids = [token for token in tokenizer.encode(TEXT.replace("\n", " ")) if token < vocab_size]
    return ids[: max_model_len - 1]


def score_tokens(core: EngineCore, tokenizer: Tokenizer, token_ids: list[int]) -> list[TokenLogprob]:
    """Return the likeliest tokens at each place of a prompt except the first; empty if not available."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=MAX_LOGPROBS, ignore_eos=True)
    request = Request(
        "text", token_ids, params, max_tokens=1, tokenizer=tokenizer, vocab_size=core.info.vocab_size,
        arrived_at=0.0,
    )  # fmt: skip
    core.add(request)
    found: list[TokenLogprob] = []
    while core.has_work:
        for update in core.step():
            if update.delta.prompt_logprobs is not None:
                found += update.delta.prompt_logprobs.rest
    return found
