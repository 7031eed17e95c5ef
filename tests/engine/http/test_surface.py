from __future__ import annotations

import gzip
import inspect
import json
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, NamedTuple

import anthropic
import openai
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.embedding_create_params as embedding_params
import pytest
import pytest_asyncio
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from http_served import HttpServed, Reply, demo_http, package_clients
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.prompt import RESERVED
from octavo.engine.api.sampling_params import PARAMETERS, SamplingParams
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.http.chat import ChatRequest
from octavo.engine.http.completions import CompletionRequest
from octavo.engine.http.embeddings import EmbeddingRequest
from octavo.engine.http.messages import MessagesRequest
from octavo.engine.http.request_model import RequestModel, parse
from octavo.engine.http.rerank import RerankRequest
from octavo.engine.http.responses import ResponsesRequest
from octavo.engine.http.sampling import SamplingFields
from octavo.engine.http.tokens import DetokenizeRequest, TokenizeRequest

pytestmark = pytest.mark.server
on_demo = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
RERANK, TOKENIZE, DETOKENIZE = "/v1/rerank", "/tokenize", "/detokenize"
TALE = [{"role": "user", "content": "Tell me a story about Mara and a lamp. " * 6}]
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALE, "temperature": 0, "max_tokens": 6},
    COMPLETIONS: {"prompt": "Once there was a", "temperature": 0, "max_tokens": 6},
    EMBEDDINGS: {"input": "Once there was a", "encoding_format": "float"},
    RERANK: {"query": "Who bakes?", "documents": ["A baker.", "A lamp."], "yes": "a", "no": "b"},
    TOKENIZE: {"prompt": "Once there was a"},
    DETOKENIZE: {"tokens": [300, 301]},
    MESSAGES: {"messages": HI, "max_tokens": 2},
    COUNT: {"messages": HI},
    RESPONSES: {"input": "Hi", "max_output_tokens": 2},
}
KINDS: dict[str, type[RequestModel]] = {
    CHAT: ChatRequest, COMPLETIONS: CompletionRequest, EMBEDDINGS: EmbeddingRequest, RERANK: RerankRequest,
    TOKENIZE: TokenizeRequest, DETOKENIZE: DetokenizeRequest,
}  # fmt: skip

# Field: (value in the request, expected SamplingParams).
SAMPLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_tokens": (5, {"max_tokens": 5}),
    "min_tokens": (2, {"min_tokens": 2}),
    "temperature": (0.5, {"temperature": 0.5}),
    "top_p": (0.5, {"top_p": 0.5}),
    "top_k": (7, {"top_k": 7}),
    "min_p": (0.5, {"min_p": 0.5}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "presence_penalty": (1.5, {"presence_penalty": 1.5}),
    "frequency_penalty": (-1.5, {"frequency_penalty": -1.5}),
    "logit_bias": ({"7": 50}, {"logit_bias": {7: 50.0}}),
    "seed": (-1, {"seed": 2**64 - 1}),
    "n": (3, {"n": 3}),
    "stop": ("x", {"stop": ("x",)}),
    "stop_token_ids": ([5, 6], {"stop_ids": (5, 6)}),
    "include_stop_str_in_output": (True, {"include_stop_str_in_output": True}),
    "bad_words": (["a", "b c"], {"bad_words": ("a", "b c")}),
    "allowed_token_ids": ([5, 6], {"allowed_token_ids": (5, 6)}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "prompt_logprobs": (2, {"prompt_logprobs": 2}),
    "speculate": ("ngram", {"speculate": "ngram"}),
    "target_itl": (20.0, {"target_itl": 20.0}),
    "target_ttft": (200.0, {"target_ttft": 200.0}),
    "response_format": (FORMAT, {"structured": StructuredOutput(json_schema=SCHEMA)}),
    "structured_outputs": ({"regex": "a|b"}, {"structured": StructuredOutput(regex="a|b")}),
    "guided_json": (SCHEMA, {"structured": StructuredOutput(json_schema=SCHEMA)}),
    "json_schema": (json.dumps(SCHEMA), {"structured": StructuredOutput(json_schema=json.dumps(SCHEMA))}),
    "guided_regex": ("a|b", {"structured": StructuredOutput(regex="a|b")}),
    "regex": ("a|b", {"structured": StructuredOutput(regex="a|b")}),
    "guided_choice": (["a", "b"], {"structured": StructuredOutput(choice=("a", "b"))}),
    "guided_grammar": ('root ::= "a"', {"structured": StructuredOutput(grammar='root ::= "a"')}),
    "ebnf": ('root ::= "a"', {"structured": StructuredOutput(grammar='root ::= "a"')}),
}


class Demo(NamedTuple):
    served: HttpServed
    chat: openai.AsyncOpenAI
    claude: anthropic.AsyncAnthropic

    async def send(self, path: str, body: dict[str, Any]) -> Reply:
        methods: dict[str, Callable[..., Any]] = {
            CHAT: self.chat.chat.completions.create, COMPLETIONS: self.chat.completions.create,
            EMBEDDINGS: self.chat.embeddings.create, RESPONSES: self.chat.responses.create,
            MESSAGES: self.claude.messages.create, COUNT: self.claude.messages.count_tokens,
        }  # fmt: skip
        if (create := methods.get(path)) is None:
            return await self.served.post(path, body)
        known = inspect.signature(create).parameters
        own = {"model": "demo", **{name: value for name, value in body.items() if name in known}}
        try:
            answer = await create(**own, extra_body={k: v for k, v in body.items() if k not in known})
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            return Reply(error.status_code, {}, error.response.content)
        return Reply(200, {}, answer.to_json(warnings=False).encode())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def demo() -> AsyncIterator[Demo]:
    async with demo_http() as served, package_clients(served.address) as clients:
        yield Demo(served, *clients)


@pytest.fixture
def asked(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def generate(_: object, params: SamplingParams, *, request_id: str, **_options: object) -> Any:
        found.append((request_id, params))
        raise InvalidRequest("seen")

    monkeypatch.setattr(demo.served.server.services.handler, "generate", generate)
    return found


CONSTRAINTS = [name for name, (_, wanted) in SAMPLED.items() if "structured" in wanted]


@on_demo
@pytest.mark.parametrize("names", [SAMPLED.keys() - CONSTRAINTS, *([name] for name in CONSTRAINTS)])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_sampling_fields_reach_the_engine(
    demo: Demo, path: str, names: Collection[str], asked: list[Any]
) -> None:
    await demo.send(path, BASE[path] | {name: SAMPLED[name][0] for name in names})
    wanted: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
    for name in names:
        wanted |= SAMPLED[name][1]
    assert asked[0][1] == SamplingParams(**wanted)


@on_demo
async def test_requests_have_the_clients_id(demo: Demo, asked: list[Any]) -> None:
    for path in (CHAT, COMPLETIONS, EMBEDDINGS, RERANK):
        await demo.send(path, BASE[path] | {"request_id": "mine"})
        await demo.served.post(path, json.dumps(BASE[path]).encode(), x_request_id="mine")
    ids = [request_id for request_id, _ in asked]
    assert [ids.count("mine"), ids.count("mine-0")] == [6, 2]


def test_minus_one_of_top_k_keeps_all_tokens() -> None:
    request = parse(CompletionRequest, b'{"prompt": "x", "top_k": -1}')
    assert request.sampling({"top_k": 20}, max_tokens=1, logprobs=None, structured=None).top_k == 0


def test_every_sampling_parameter_has_its_field() -> None:
    served = {name for _, wanted in SAMPLED.values() for name in wanted}
    elsewhere = {
        "logprobs", "pooling", "max_reasoning_tokens", "structured_from_first_token", "skip_special_tokens",
        "num_output_tokens",
    }  # fmt: skip
    assert PARAMETERS.keys() - elsewhere == served


class Served(NamedTuple):
    fields: dict[str, Any]
    right: Callable[[Any], bool]


def _one(answer: Any) -> Any:
    return answer["choices"][0]


def text_of(answer: Any) -> str:
    return str(_one(answer)["text"] if "text" in _one(answer) else _one(answer)["message"]["content"])


def _size(answer: Any) -> Any:
    return answer["usage"]["prompt_tokens"]


def _words(answer: Any) -> set[str]:
    return {word.strip(".,") for word in text_of(answer).split()}


def _joined(answer: Any) -> bytes:
    return b"".join(bytes(e["bytes"] or ()) for e in _one(answer)["logprobs"]["content"])


def _is_b_or_c(answer: Any) -> bool:
    return json.loads(text_of(answer)) in ({"a": "b"}, {"a": "c"})


BOTH: dict[str, Served] = {
    "max_tokens": Served({"max_tokens": 2}, lambda a: a["usage"]["completion_tokens"] == 2),
    "min_tokens": Served({"min_tokens": 6}, lambda a: a["usage"]["completion_tokens"] == 6),
    "n": Served({"n": 2}, lambda a: [c["index"] for c in a["choices"]] == [0, 1]),
    "best_of": Served({"n": 2, "best_of": 2}, lambda a: len(a["choices"]) == 2),
    "stop": Served({"stop": ["e"], "max_tokens": 30}, lambda a: _one(a)["stop_reason"] == "e"),
    "return_token_ids": Served({"return_token_ids": True}, lambda a: len(_one(a)["token_ids"]) == 6),
    "response_format": Served({"response_format": FORMAT, "max_tokens": 40}, _is_b_or_c),
    "guided_choice": Served({"guided_choice": ["left", "right"]}, lambda a: text_of(a) in ("left", "right")),
    "include_stop_str_in_output": Served(
        {"stop": ["e"], "include_stop_str_in_output": True, "max_tokens": 30},
        lambda a: text_of(a).count("e") == 1 and text_of(a).endswith("e"),
    ),
    "bad_words": Served({"bad_words": ["baker", "there"]}, lambda a: not {"baker", "there"} & _words(a)),
    "allowed_token_ids": Served(
        {"allowed_token_ids": [300, 301], "return_token_ids": True},
        lambda a: set(_one(a)["token_ids"]) <= {300, 301},
    ),
    "truncate_prompt_tokens": Served(
        {"truncate_prompt_tokens": 3, "return_token_ids": True}, lambda a: _size(a) == 3
    ),
    "truncation_side": Served(
        {"truncate_prompt_tokens": 2, "truncation_side": "right"}, lambda a: _size(a) == 2
    ),
}
SERVED: dict[str, dict[str, Served]] = {
    CHAT: BOTH
    | {
        "messages": Served(
            {"messages": [{"role": "developer", "content": [{"type": "text", "text": "Hi"}]}]},
            lambda a: _size(a) > 5
        ),
        "max_completion_tokens": Served(
            {"max_tokens": None, "max_completion_tokens": 3}, lambda a: a["usage"]["completion_tokens"] == 3
        ),
        "logprobs": Served(
            {"regex": "né😀", "logprobs": True, "max_tokens": 30}, lambda a: _joined(a) == "né😀".encode()
        ),
        "top_logprobs": Served(
            {"logprobs": True, "top_logprobs": 2},
            lambda a: len(_one(a)["logprobs"]["content"][0]["top_logprobs"]) == 2
        ),
        "return_tokens_as_token_ids": Served(
            {"logprobs": True, "return_tokens_as_token_ids": True},
            lambda a: _one(a)["logprobs"]["content"][0]["token"].startswith("token_id:")
        ),
        "prompt_logprobs": Served(
            {"prompt_logprobs": 1}, lambda a: len(a["prompt_logprobs"]) == _size(a)
        ),
        "add_generation_prompt": Served(
            {"messages": HI, "add_generation_prompt": False}, lambda a: _size(a) < 10
        ),
        "continue_final_message": Served(
            {"messages": [*HI, {"role": "assistant", "content": "Once"}], "continue_final_message": True},
            lambda a: _size(a) > 8
        ),
    },
    COMPLETIONS: BOTH
    | {
        "prompt": Served(
            {"prompt": [[300, 301], [302, 303, 304]]}, lambda a: _size(a) == 5
        ),
        "echo": Served(
            {"echo": True, "prompt": "<|im_start|>user\nHi"},
            lambda a: text_of(a).startswith("<|im_start|>user\nHi")
        ),
        "logprobs": Served(
            {"logprobs": 2, "echo": True, "max_tokens": 0},
            lambda a: _one(a)["logprobs"]["token_logprobs"][0] is None
            and "".join(_one(a)["logprobs"]["tokens"]) == "Once there was a"
        ),
        "return_tokens_as_token_ids": Served(
            {"logprobs": 0, "return_tokens_as_token_ids": True},
            lambda a: _one(a)["logprobs"]["tokens"][0].startswith("token_id:")
        ),
        "prompt_logprobs": Served(
            {"prompt_logprobs": 1},
            lambda a: len(_one(a)["prompt_logprobs"]) == _size(a)
        ),
    },
    EMBEDDINGS: {
        "input": Served({"input": ["a", "b"]}, lambda a: [d["index"] for d in a["data"]] == [0, 1]),
        "dimensions": Served({"dimensions": 8}, lambda a: len(a["data"][0]["embedding"]) == 8),
        "encoding_format": Served(
            {"encoding_format": "base64"}, lambda a: isinstance(a["data"][0]["embedding"], str)
        ),
        "normalize": Served(
            {"normalize": False}, lambda a: abs(sum(x * x for x in a["data"][0]["embedding"]) - 1) > 0.01
        ),
        "truncate_prompt_tokens": Served(
            {"truncate_prompt_tokens": 2}, lambda a: _size(a) == 2
        ),
        "truncation_side": Served(
            {"truncate_prompt_tokens": 1, "truncation_side": "left"},
            lambda a: _size(a) == 1
        ),
    },
    RERANK: {
        "documents": Served({"documents": ["a", {"text": "b"}, "c"]}, lambda a: len(a["results"]) == 3),
        "top_n": Served({"top_n": 1}, lambda a: len(a["results"]) == 1),
        "return_documents": Served({"return_documents": False}, lambda a: "document" not in a["results"][0]),
    },
    TOKENIZE: {
        "prompt": Served({"prompt": "a b"}, lambda a: a["count"] == len(a["tokens"]) == 2),
        "messages": Served({"prompt": None, "messages": HI}, lambda a: a["count"] == 10),
        "add_special_tokens": Served({"add_special_tokens": False}, lambda a: a["count"] > 1),
        "return_token_strs": Served(
            {"return_token_strs": True}, lambda a: len(a["token_strs"]) == a["count"]
        ),
        "add_generation_prompt": Served(
            {"prompt": None, "messages": HI, "add_generation_prompt": False}, lambda a: a["count"] < 10
        ),
        "continue_final_message": Served(
            {"prompt": None, "messages": HI, "continue_final_message": True}, lambda a: a["count"] < 10
        ),
    },
    DETOKENIZE: {
        "tokens": Served({"tokens": [300]}, lambda a: len(a["prompt"]) > 0),
    },
}  # fmt: skip

# Fields that change no answer of the embedded model, sent together.
LABELS: dict[str, Any] = {
    "model": "demo",
    "user": "x",
    "priority": 3,
    "cache_salt": "x",
    "request_id": "mine",
}
TEXT_LABELS: dict[str, Any] = LABELS | {
    "use_beam_search": False, "stream": False, "seed": 1, "length_penalty": 1.0, "session_id": "mine",
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "add_special_tokens": False,
}  # fmt: skip
TEMPLATE: dict[str, Any] = {
    "chat_template_kwargs": {"thinking": False}, "documents": [{"text": "x"}], "reasoning_effort": "low",
}  # fmt: skip
ACCEPTED: dict[str, dict[str, Any]] = {
    CHAT: {
        **TEXT_LABELS, **TEMPLATE, "safety_identifier": "x", "prompt_cache_key": "x", "store": False,
        "modalities": ["text"], "service_tier": "auto", "verbosity": "medium", "metadata": {"label": "x"},
        "echo": False, "include_reasoning": False,
    },
    COMPLETIONS: TEXT_LABELS,
    EMBEDDINGS: {**LABELS, "pooling": "mean", "add_special_tokens": False},
    RERANK: {
        **LABELS, "query": "Who?", "instruction": "x", "template": "{query}{document}", "yes": "c", "no": "d",
    },
    TOKENIZE: {**TEMPLATE, "model": "demo", "prompt": None, "messages": HI},
    DETOKENIZE: {"model": "demo"},
    RESPONSES: {"user": "x"},
}  # fmt: skip
SAMPLING_REFUSED: dict[str, Any] = {
    "best_of": 3, "use_beam_search": True, "truncate_prompt_tokens": 0, "length_penalty": 0.5,
    "allowed_token_ids": [], "bad_words": [" "], "truncation_side": "middle",
    "guided_decoding_backend": "xgrammar", "guided_whitespace_pattern": " ", "logits_processors": [],
    "mm_processor_kwargs": {}, "media_io_kwargs": {}, "kv_transfer_params": {}, "ec_transfer_params": {},
    "vllm_xargs": {}, "prompt_embeds": "x", "watermarking": True, "logprob_token_ids": [1],
    "repetition_detection": {}, "stream_interval": 2, "return_prompt_text": True,
    "return_token_offsets": True, "return_mm_kwargs": False, "routed_experts_prompt_start": 1,
    "enable_thinking": False, "invented": 1,
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    CHAT: SAMPLING_REFUSED
    | {
        "echo": True, "chat_template": "x", "add_special_tokens": True, "functions": [{"name": "f"}],
        "function_call": "auto", "modalities": ["audio"], "audio": {"voice": "x"},
        "prediction": {"type": "x"},
        "web_search_options": {}, "store": True, "service_tier": "flex",
        "verbosity": "low", "prompt_cache_retention": "24h", "prompt_cache_options": {}, "moderation": {},
        "top_logprobs": 3, "stream_options": {"include_usage": True}, "suffix": "x",
    },
    COMPLETIONS: SAMPLING_REFUSED
    | {"suffix": "x", "messages": HI, "stream_options": {"include_usage": True}},
    EMBEDDINGS: {"truncate_prompt_tokens": 0, "messages": HI, "task": "x", "invented": 1},
    RERANK: {"max_chunks_per_doc": 1, "max_tokens_per_doc": 1, "truncate_prompt_tokens": 5, "invented": 1},
    TOKENIZE: {"invented": 1},
    DETOKENIZE: {"invented": 1},
    MESSAGES: {
        "container": "x", "inference_geo": "eu", "speed": "fast", "diagnostics": {}, "mcp_servers": [],
        "betas": ["x"], "kv_transfer_params": {}, "invented": 1, "service_tier": "priority",
        "thinking": {"type": "deeply"},
    },
    RESPONSES: {
        "max_tool_calls": 1, "access_programs": [], "moderation": {}, "prompt_cache_options": {},
        "context_management": [], "prompt_cache_retention": "24h", "background_options": {}, "image": {},
        "previous_response_id": "x", "conversation": "x", "prompt": {"id": "x"}, "store": True,
        "background": True, "truncation": "auto", "top_logprobs": 2, "service_tier": "flex",
        "vllm_xargs": {}, "kv_transfer_params": {}, "invented": 1,
    },
}  # fmt: skip


def _pairs(table: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return [(path, name) for path, fields in table.items() for name in fields]


@on_demo
@pytest.mark.parametrize(("path", "name"), _pairs(SERVED))
async def test_a_served_field_has_its_effect(demo: Demo, path: str, name: str) -> None:
    fields, right = SERVED[path][name]
    reply = await demo.send(path, BASE[path] | fields)
    assert reply.status == 200, reply.body
    assert right(reply.json), reply.body


@on_demo
@pytest.mark.parametrize("path", ACCEPTED)
async def test_fields_without_an_effect_are_accepted(demo: Demo, path: str) -> None:
    reply = await demo.send(path, BASE[path] | ACCEPTED[path])
    assert reply.status == 200, reply.body
    assert path not in (CHAT, COMPLETIONS, RERANK) or reply.json["id"].endswith("-mine")
    assert reply.json.get("model", "demo") == "demo"


@on_demo
@pytest.mark.parametrize(("path", "name"), _pairs(REFUSED))
async def test_a_field_that_is_not_served_is_refused_by_name(demo: Demo, path: str, name: str) -> None:
    reply = await demo.send(path, BASE[path] | {name: REFUSED[path][name]})
    assert reply.status == 400, reply.body
    assert name in reply.json["error"]["message"]
    param = reply.json["error"].get("param")
    assert param is None or param.startswith(name)


EPHEMERAL = {"type": "ephemeral", "ttl": "5m"}
ITEM = {"type": "message", "role": "user", "content": "Hi"}


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
CHOICE = {"type": "function", "function": {"name": "f"}}
TAG = {"triggers": ["a"], "structures": [{"begin": "a", "schema": {}, "end": "b", "invented": 1}]}


def _called(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "tool_calls": [CHOICE | fields]}]}


def _said(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


SOURCE = {"type": "text", "data": "x"}
DOCUMENT = {"type": "document", "source": SOURCE}
EDIT = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1, "invented": 1}}
TEXT = {"type": "text", "text": "Hi"}


def _asked(part: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{**ITEM, "content": [part]}]}


REFUSED_WITHIN: dict[str, list[tuple[str, dict[str, Any]]]] = {
    CHAT: [
        ("response_format.json_schema", {"response_format": FORMAT | {"type": "json_object"}}),
        ("response_format.json_schema", {"response_format": FORMAT | {"type": "text"}}),
        ("response_format.triggers", {"response_format": {"type": "text", "triggers": ["a"]}}),
        ("response_format.structures", {"response_format": FORMAT | {"structures": []}}),
        ("response_format", {"response_format": {"type": "structural_tag", **TAG}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": TAG}}),
        ("tool_choice.invented", {"tools": [TOOL], "tool_choice": CHOICE | {"invented": 1}}),
        (
            "tool_choice.function.invented",
            {"tools": [TOOL], "tool_choice": CHOICE | {"function": {"name": "f", "invented": 1}}},
        ),
        ("tools[0].function.invented", {"tools": [TOOL | {"function": FUNCTION | {"invented": 1}}]}),
        ("messages[1].tool_calls[0].type", _called(type="custom")),
        ("messages[1].tool_calls[0].invented", _called(invented=1)),
        ("messages[1].tool_calls[0].function.invented", _called(function={"name": "f", "invented": 1})),
        (
            "messages[0].content[0].image_url",
            {"messages": [{"role": "user", "content": [
                {"type": "text", "text": "Hi", "image_url": {"url": "x"}},
            ]}]},
        ),
        *(
            (f"chat_template_kwargs.{name}", {"chat_template_kwargs": {name: False}})
            for name in RESERVED
        ),
        (
            "chat_template_kwargs.enable_thinking",
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"},
        ),
        (
            "messages[0].reasoning",
            {"messages": [{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}, *HI]},
        ),
        (
            "chat_template_kwargs.reasoning_effort",
            {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"},
        ),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("stop_token_ids", {"stop_token_ids": [10**6]}),
        ("thinking_token_budget", {"thinking_token_budget": -2}),
        ("guided_json", {"guided_json": {"type": "invented"}}),
        ("guided_choice", {"guided_choice": [""]}),
        ("guided_choice", {"guided_choice": []}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("response_format.json_schema.schema", {"response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "invented"}},
        }}),
        ("max_completion_tokens", {"max_tokens": None, "max_completion_tokens": 0}),
        ("temperature", {"temperature": -1}),
    ],
    TOKENIZE: [
        ("tools", {"tools": [TOOL]}),
        ("documents", {"documents": []}),
        ("chat_template_kwargs", {"chat_template_kwargs": {}}),
        ("add_generation_prompt", {"add_generation_prompt": True}),
        ("continue_final_message", {"continue_final_message": False}),
        ("reasoning_effort", {"reasoning_effort": "low"}),
        ("add_special_tokens", {"prompt": None, "messages": HI, "add_special_tokens": True}),
        ("tools[0]", {"prompt": None, "messages": HI, "tools": [{"type": "zzz"}]}),
    ],
    MESSAGES: [
        *(
            (f"messages[0].content[0].{name}", _said(block))
            for name, block in (
                ("thinking", TEXT | {"thinking": "x"}),
                ("name", TEXT | {"name": "x"}),
                ("input", TEXT | {"input": {}}),
                ("source", TEXT | {"source": {"type": "url", "url": "x"}}),
                ("title", TEXT | {"title": "x"}),
                ("context", TEXT | {"context": "x"}),
                ("cache_control.invented", TEXT | {"cache_control": EPHEMERAL | {"invented": 1}}),
                ("cache_control.type", TEXT | {"cache_control": {"type": "invented"}}),
                ("citations", DOCUMENT | {"citations": {"enabled": True}}),
                ("source.invented", DOCUMENT | {"source": SOURCE | {"invented": 1}}),
                ("source.url", DOCUMENT | {"source": SOURCE | {"url": "x"}}),
            )
        ),
        ("tools[1].name", {"tools": [{"name": "f"}, {"name": "f"}], "tool_choice": {"type": "any"}}),
        ("metadata.invented", {"metadata": {"invented": "x"}}),
        ("cache_control.invented", {"cache_control": EPHEMERAL | {"invented": 1}}),
        ("context_management.edits[0].keep", {"context_management": {"edits": [EDIT]}}),
        ("tool_choice.name", {"tools": [{"name": "zz"}], "tool_choice": {"type": "any", "name": "zz"}}),
        ("thinking.budget_tokens", {"thinking": {"type": "disabled", "budget_tokens": 5}}),
        ("output_config.format.type", {"output_config": {"format": {"type": "bogus", "schema": {}}}}),
        (
            "output_config.format.schema",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "invented"}}}},
        ),
    ],
    COUNT: [
        ("thinking.type", {"thinking": {"type": "zany"}}),
        ("output_config.format.type", {"output_config": {"format": {"type": "bogus", "schema": {}}}}),
    ],
    RESPONSES: [
        ("text.format.schema", {"text": {"format": {"type": "json_object", "schema": SCHEMA}}}),
        ("text.format.schema", {"text": {"format": {"type": "text", "schema": SCHEMA}}}),
        ("input[0].output", {"input": [ITEM | {"output": "x"}]}),
        ("input[0].arguments", {"input": [{"role": "user", "content": "Hi", "arguments": "{}"}]}),
        ("input[0].content[0].image_url", _asked({"type": "input_text", "text": "Hi", "image_url": "x"})),
        ("tools[0].parameters", {"tools": [{"type": "namespace", "name": "x", "parameters": {}}]}),
        ("tools[0].tools", {"tools": [{"type": "function", "name": "x", "tools": []}]}),
        (
            "tool_choice.invented",
            {
                "tools": [{"type": "function", **FUNCTION}],
                "tool_choice": {"type": "function", "name": "f", "invented": 1},
            },
        ),
        (
            "tools[0].tools[1].name",
            {"tools": [{"type": "namespace", "name": "x", "tools": [
                {"type": "function", "name": "a"}, {"type": "function", "name": "a b"},
            ]}]},
        ),
        ("max_output_tokens", {"max_output_tokens": 0}),
    ],
}  # fmt: skip


@on_demo
@pytest.mark.parametrize(
    ("path", "name", "fields"), [(path, *each) for path, rows in REFUSED_WITHIN.items() for each in rows]
)
async def test_a_refusal_starts_with_the_name_of_the_field(
    demo: Demo, path: str, name: str, fields: dict[str, Any]
) -> None:
    reply = await demo.send(path, BASE[path] | fields)
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    assert error["message"].startswith(name)
    assert path in (MESSAGES, COUNT) or error["param"] == name


def test_no_field_of_the_api_is_missing_from_the_tables() -> None:
    agents = {MESSAGES: MessagesRequest.model_fields, RESPONSES: ResponsesRequest.model_fields}
    elsewhere = {"tools", "tool_choice", "parallel_tool_calls", "chat_template", "include_reasoning"}
    headers = {"user_profile_id", "workspace_id"}
    for path, params in (
        (CHAT, chat_params.CompletionCreateParamsBase),
        (COMPLETIONS, completion_params.CompletionCreateParamsBase),
        (EMBEDDINGS, embedding_params.EmbeddingCreateParams),
        (MESSAGES, MessageCreateParamsBase),
        (RESPONSES, ResponseCreateParamsBase),
    ):
        others = agents.get(path) or ({} if path == EMBEDDINGS else SAMPLED)
        known = {
            *SERVED.get(path, ()),
            *REFUSED[path],
            *ACCEPTED.get(path, ()),
            *others,
            *elsewhere,
            *headers,
        }
        assert params.__annotations__.keys() <= known, path
    for path, kind in KINDS.items():
        sampled = SAMPLED.keys() if issubclass(kind, SamplingFields) else set()
        known = {*SERVED[path], *REFUSED[path], *ACCEPTED[path], *sampled, *elsewhere}
        assert kind.model_fields.keys() - known <= {"max_reasoning_tokens", "thinking_token_budget"}, path


WRONG: dict[str, tuple[str, Any, str]] = {
    "not JSON": (CHAT, b"{", "the body must be JSON"),
    "no object": (CHAT, b"[1]", "the body must be"),
    "nothing": (CHAT, {}, "messages must have at least one message"),
    "a number as text": (CHAT, {"messages": HI, "temperature": "1"}, "temperature must be a number"),
    "out of range": (CHAT, {"messages": HI, "top_p": 2}, "top_p must be"),
    "mixed prompts": (COMPLETIONS, {"prompt": ["a", 5]}, "prompt must be a string or"),
    "no prompts": (COMPLETIONS, {"prompt": []}, "prompt must have between 1 and"),
    "a float as a count": (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens must be an integer"),
    "two budgets": (
        CHAT, {"messages": HI, "thinking_token_budget": 9, "max_reasoning_tokens": 8}, "must equal max_reas"
    ),
    "two shapes": (CHAT, {"messages": HI, "regex": "a", "guided_choice": ["b"]}, "regex and guided_choice"),
    "half a surrogate, and no JSON": (CHAT, b'{"messages": "\\ud83d', "the body must be JSON"),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "image_url",
    ),
    "a field of a message": (CHAT, {"messages": [{**HI[0], "audio": {"id": "x"}}]}, "messages[0].audio"),
    "a bias": (CHAT, {"messages": HI, "logit_bias": {"x": 1}}, "logit_bias must have token ids"),
    "a token of an input": (EMBEDDINGS, {"input": [-1]}, "input must have token ids in [0, "),
    "a token": (DETOKENIZE, {"tokens": [10**6]}, "token ids must be in [0, "),
    "both inputs": (TOKENIZE, {"prompt": "a", "messages": HI}, "either prompt or messages"),
    "dimensions": (EMBEDDINGS, {"input": "a", "dimensions": 10**6}, "dimensions must be between 1 and"),
    "no documents": (RERANK, {"query": "a", "documents": [], "yes": "a", "no": "b"}, "documents can be rer"),
    "JSON unasked for": (
        COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_object"}}, "json_object must come",
    ),
}  # fmt: skip


@on_demo
@pytest.mark.parametrize("name", WRONG)
async def test_refusals_name_the_wrong_field(demo: Demo, name: str) -> None:
    path, body, text = WRONG[name]
    reply = await demo.served.post(path, body)
    assert reply.status == 400, reply.body
    assert text in reply.json["error"]["message"]
    assert reply.json["error"]["type"] == "invalid_request_error"


ODD: dict[str, tuple[str, Any]] = {
    "a byte order mark": (CHAT, b"\xef\xbb\xbf" + json.dumps(BASE[CHAT]).encode()),
    "half a surrogate": (
        CHAT,
        b'{"messages": [{"role": "user", "content": "\\ud83d \\\\ud83d"}], "max_tokens": 1}',
    ),
    "no parts": (CHAT, {"messages": [{"role": "user", "content": []}], "max_tokens": 1}),
    "no content": (CHAT, {"messages": [*HI, {"role": "assistant", "content": None}, *HI], "max_tokens": 1}),
    "no id of a call": (CHAT, {"messages": [*HI, {"role": "tool", "content": "x"}], "max_tokens": 1}),
    "top_p 0": (CHAT, BASE[CHAT] | {"top_p": 0, "temperature": 1}),
    "no tools": (CHAT, BASE[CHAT] | {"tools": [], "tool_choice": "auto"}),
    "a request of vllm bench serve": (
        COMPLETIONS,
        {
            "model": "demo", "prompt": [300, 301], "temperature": 0.0, "repetition_penalty": 1.0,
            "max_tokens": 2, "logprobs": None, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
    ),
    "a request of guidellm": (
        CHAT,
        {
            "model": "demo", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 2, "stop": None, "ignore_eos": True,
        },
    ),
    "the prompt in a stream": (COMPLETIONS, BASE[COMPLETIONS] | {"echo": True, "stream": True}),
    "no blocks": ("/v1/messages", {"messages": [{"role": "user", "content": []}], "max_tokens": 1}),
    "encrypted thinking": (
        "/v1/messages",
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                *HI,
            ],
            "max_tokens": 1,
        },
    ),
    "labels and marks of Claude Code": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": [
                {"type": "text", "text": "Hi", "citations": None, "cache_control": EPHEMERAL},
                DOCUMENT | {"title": "x", "citations": {"enabled": False}, "cache_control": EPHEMERAL},
            ]}],
            "max_tokens": 1, "metadata": {"user_id": "x"}, "cache_control": EPHEMERAL,
            "system": [{"type": "text", "text": "x", "cache_control": EPHEMERAL | {"scope": "global"}}],
        },
    ),
    "no text": ("/v1/responses", {"input": [{"role": "user", "content": []}], "max_output_tokens": 1}),
}  # fmt: skip


@on_demo
@pytest.mark.parametrize("name", ODD)
async def test_odd_requests_that_clients_send_are_served(demo: Demo, name: str) -> None:
    path, body = ODD[name]
    reply = await demo.served.post(path, body)
    assert reply.status == 200, reply.body


@on_demo
async def test_compressed_bodies_are_refused(demo: Demo) -> None:
    body = gzip.compress(json.dumps(BASE[CHAT]).encode())
    reply = await demo.served.ask(
        "POST", CHAT, body, {"content-type": "application/json", "content-encoding": "gzip"}
    )
    assert reply.status == 415
    assert "content-encoding" in reply.json["error"]["message"]


@on_demo
async def test_top_p_of_0_keeps_the_likeliest_token(demo: Demo) -> None:
    greedy = await demo.served.post(CHAT, BASE[CHAT])
    cut = await demo.served.post(CHAT, BASE[CHAT] | {"temperature": 1, "top_p": 0, "seed": 5})
    assert text_of(cut.json) == text_of(greedy.json)


@on_demo
async def test_null_is_the_same_as_left_out(demo: Demo) -> None:
    for path in (CHAT, COMPLETIONS):
        base = await demo.served.post(path, BASE[path])
        nulls = dict.fromkeys(KINDS[path].model_fields) | {"invented": None}
        reply = await demo.served.post(path, nulls | BASE[path])
        assert reply.status == 200, reply.body
        assert text_of(reply.json) == text_of(base.json)


@on_demo
async def test_answers_are_those_of_the_openai_package(demo: Demo) -> None:
    more = {"logprobs": True, "top_logprobs": 1}
    chat = (await demo.served.post(CHAT, BASE[CHAT] | more)).json
    completion = (await demo.served.post(COMPLETIONS, BASE[COMPLETIONS] | {"logprobs": 1})).json
    embedding = (await demo.served.post(EMBEDDINGS, BASE[EMBEDDINGS])).json
    models = (await demo.served.get("/v1/models")).json
    for kind, answer in (
        (ChatCompletion, chat), (Completion, completion), (CreateEmbeddingResponse, embedding),
        (Model, models["data"][0]),
    ):  # fmt: skip
        found = kind.model_validate(answer, strict=True)
        assert unknown_fields(found) <= {"stop_reason", "max_model_len", "root", "parent"}, kind
    stream = await demo.served.post(CHAT, BASE[CHAT] | more | {"stream": True})
    for event in stream.events:
        assert unknown_fields(ChatCompletionChunk.model_validate(event, strict=True)) <= {"stop_reason"}


def unknown_fields(model: Any) -> set[str]:
    found = set(model.model_extra or {})
    for name in type(model).model_fields:
        value = getattr(model, name, None)
        for item in value if isinstance(value, list) else [value]:
            if hasattr(item, "model_extra"):
                found |= unknown_fields(item)
    return found


@on_demo
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_is_the_answer_in_pieces(demo: Demo, path: str) -> None:
    form = {"logprobs": True, "top_logprobs": 1} if path == CHAT else {"logprobs": 1, "echo": True}
    body = BASE[path] | form | {"n": 2, "max_tokens": 24, "ignore_eos": True}
    whole = (await demo.served.post(path, body)).json
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = await demo.served.post(path, body | options)
    assert stream.headers["content-type"].startswith("text/event-stream")
    *events, last = stream.events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert all(event["usage"] is None for event in events)
    for index, choice in enumerate(whole["choices"]):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert [c["finish_reason"] for c in own][-1] == choice["finish_reason"]
        if path == CHAT:
            assert own[0]["delta"]["role"] == "assistant"
            assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
            entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert [e["token"] for e in entries] == [e["token"] for e in choice["logprobs"]["content"]]
        else:
            assert "".join(c["text"] for c in own) == choice["text"]
            for name, values in choice["logprobs"].items():
                pieces = [value for c in own for value in c["logprobs"][name]]
                if name == "token_logprobs":
                    assert pieces == pytest.approx(values, abs=1e-3)
                elif name != "top_logprobs":
                    assert pieces == values


@on_demo
async def test_bytes_of_split_characters_in_completions(demo: Demo) -> None:
    body = {"prompt": "Hi", "regex": "né😀", "max_tokens": 30, "logprobs": 0, "temperature": 0}
    choice = (await demo.served.post(COMPLETIONS, body)).json["choices"][0]
    joined = b""
    for token in choice["logprobs"]["tokens"]:
        hexes = token.removeprefix("bytes:").split("\\x")[1:]
        joined += bytes(int(h, 16) for h in hexes) if token.startswith("bytes:") else token.encode()
    assert joined == "né😀".encode()
    assert choice["logprobs"]["text_offset"][-1] <= len("né😀")


@on_demo
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_has_the_ids_of_parts_of_characters(demo: Demo, path: str) -> None:
    body = BASE[path] | {"regex": "né😀😀", "max_tokens": 30, "return_token_ids": True}
    choice = _one((await demo.served.post(path, body)).json)
    own = [_one(event) for event in (await demo.served.post(path, body | {"stream": True})).events]
    assert len(choice["token_ids"]) > len("né😀😀")
    assert [i for c in own for i in c["token_ids"]] == choice["token_ids"]
    if path == COMPLETIONS:
        assert [c["prompt_token_ids"] for c in own] == [choice["prompt_token_ids"]] + [None] * (len(own) - 1)


@on_demo
async def test_the_openai_client_reads_it_all(demo: Demo) -> None:
    with pytest.raises(openai.NotFoundError, match="model must be 'demo'"):
        await demo.chat.completions.create(model="other", prompt="x")
    assert (await demo.chat.models.retrieve("demo")).owned_by == "octavo"
    stream = await demo.chat.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hi"}], stream=True, max_completion_tokens=4
    )
    assert [chunk.choices[0].finish_reason async for chunk in stream][-1] in ("length", "stop")


@on_demo
async def test_paths_and_methods_that_are_not_there(demo: Demo) -> None:
    missing, wrong = await demo.served.get("/v1/nothing"), await demo.served.get(CHAT)
    assert (missing.status, wrong.status) == (404, 405)
    assert "/v1/nothing" in missing.json["error"]["message"]
    assert "POST" in wrong.json["error"]["message"]
    assert (await demo.served.get("/v1/models/other")).status == 404
    assert (await demo.served.get("/version")).json.keys() == {"version"}


@on_demo
async def test_a_prompt_is_cached_and_counted(demo: Demo) -> None:
    body = {"prompt": "Once there was a baker who baked. " * 12, "max_tokens": 1}
    await demo.served.post(COMPLETIONS, body)
    second: Reply = await demo.served.post(COMPLETIONS, body)
    assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


@pytest.mark.parametrize("is_cut", [True, False])
async def test_a_truncated_prompt_leaves_space_for_its_output(is_cut: bool) -> None:
    body = {"prompt": [300] * 100, "truncate_prompt_tokens": -1}
    async with demo_http(max_model_len=64, cut_max_tokens=is_cut) as served:
        reply = await served.post(COMPLETIONS, body | {"max_tokens": 10})
        assert reply.json["usage"]["prompt_tokens"] == 54
        for max_tokens in (64, 32_000):
            reply = await served.post(COMPLETIONS, body | {"max_tokens": max_tokens})
            assert reply.status == (200 if is_cut else 400), reply.body
            assert not is_cut or reply.json["usage"]["prompt_tokens"] == 63
