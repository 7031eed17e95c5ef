from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from fakes import FakeCore, byte_tokenizer
from http_served import HttpServed, http_served, package_clients
from octavo.engine.api.output_collector import OutputCollector
from octavo.engine.api.outputs import Delta, FinishReason
from octavo.engine.api.prompt import Prompt
from octavo.engine.api.sampling_params import SamplingParams

# Like Qwen3: tools first, <think> opened, calls and results as turns.
TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
{% endif -%}
{%- for m in messages -%}
<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}{{ "\n" }}
{%- endfor -%}
<assistant>{% if enable_thinking is not defined or enable_thinking %}<think>
{% else %}<think>

</think>

{% endif %}"""
PLAIN_TEMPLATE = TEMPLATE.partition("{% if enable_thinking")[0]


@dataclass(slots=True)
class Script:
    pieces: Sequence[str] = ()
    finish: FinishReason = FinishReason.STOP
    stop_match: str | int | None = None
    asked: list[tuple[str, SamplingParams]] = field(default_factory=list)


@dataclass(slots=True)
class Scripted:
    script: Script
    served: HttpServed
    openai: AsyncOpenAI
    anthropic: AsyncAnthropic

    def says(self, text: str, *, size: int = 3, **ends: Any) -> None:
        """Answer later requests with this text, in pieces of ``size`` characters."""
        self.script.pieces = [text[start : start + size] for start in range(0, len(text), size)]
        self.script.finish = ends.get("finish", FinishReason.STOP)
        self.script.stop_match = ends.get("stop_match")

    @property
    def prompt(self) -> str:
        return self.script.asked[-1][0]

    @property
    def params(self) -> SamplingParams:
        return self.script.asked[-1][1]


@asynccontextmanager
async def scripted(template: str = TEMPLATE, **parsers: Any) -> AsyncIterator[Scripted]:
    tokenizer = byte_tokenizer(template=template, **parsers)
    async with http_served(FakeCore(tokenizer=tokenizer)) as served:
        assert served.below is not None
        below, script = served.below, Script()
        handler = below.server.handler

        async def generate(
            prompt: Prompt, params: SamplingParams, *, request_id: str, final_only: bool = False, **_: Any
        ) -> AsyncGenerator[Delta, None]:
            assert not isinstance(prompt, str)
            ids = await below.engine.encode(prompt)
            script.asked.append((tokenizer.decode(ids), params))
            whole = OutputCollector()
            for index, piece in enumerate(script.pieces):
                is_last = index == len(script.pieces) - 1
                delta = Delta(
                    request_id=request_id,
                    index=0,
                    token_ids=(65,),
                    text=piece,
                    finish_reason=script.finish if is_last else None,
                    stop_match=script.stop_match if is_last else None,
                    prompt_tokens=len(ids),
                    cached_tokens=4,
                )
                if not final_only:
                    yield delta
                whole.add(delta)
            if final_only:
                yield whole.take()

        handler.generate = generate  # type: ignore[method-assign]
        async with package_clients(served.address) as clients:
            yield Scripted(script, served, *clients)
