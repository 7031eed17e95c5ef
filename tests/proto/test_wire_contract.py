"""The wire contract: generated modules match their source, and messages lose nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2

from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.outputs import Delta, FinishReason, PromptLogprobs, TokenLogprob
from octavo.engine.api.sampling_params import PARAMETERS, SamplingParams
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.client.client import make_request
from octavo.engine.grpc.octavo_v1 import messages
from octavo.engine.grpc.octavo_v1.cache_messages import REASONS
from octavo.proto import cache_pb2
from octavo.proto import generation_pb2 as pb

PROTO = Path(__file__).parents[2] / "proto"
SOURCES = ("octavo/v1/generation.proto", "octavo/v1/cache.proto")


@pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed (extra: dev)"
)
def test_generated_modules_match_their_source(tmp_path: Path) -> None:
    arguments = [f"-I{PROTO}", *(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python"))]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments, *SOURCES], check=True)
    made = sorted((tmp_path / "octavo/v1").iterdir())
    assert len(made) == 3 * len(SOURCES)
    for file in made:
        kept = PROTO / "octavo/v1" / file.name
        assert kept.read_text() == file.read_text(), f"{file.name} is stale; see octavo.proto's docstring"


def test_every_number_of_the_contract_is_kept() -> None:
    """Renumbering a field breaks every client silently."""
    numbers = {field.name: field.number for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert numbers == {
        "max_tokens": 1, "temperature": 2, "top_k": 3, "top_p": 4, "min_p": 5, "repetition_penalty": 6,
        "presence_penalty": 7, "frequency_penalty": 8, "logit_bias": 9, "seed": 10, "n": 11, "stop": 12,
        "stop_ids": 13, "ignore_eos": 14, "logprobs": 15, "min_tokens": 16, "prompt_logprobs": 17,
        "structured": 18,
        "quantize_after": 19,
        "speculate": 20, "target_itl": 21, "target_ttft": 22,
    }  # fmt: skip
    numbers = {field.name: field.number for field in pb.GenerateRequest.DESCRIPTOR.fields}
    assert numbers == {
        "request_id": 1, "text": 2, "token_ids": 3, "chat": 4, "sampling": 5, "output_mode": 6,
        "cache_salt": 7, "priority": 8,
    }  # fmt: skip
    numbers = {field.name: field.number for field in pb.GenerateResponse.DESCRIPTOR.fields}
    assert numbers == {
        "request_id": 1, "index": 2, "token_ids": 3, "text": 4, "logprobs": 5, "finish_reason": 6,
        "stop_string": 7, "stop_id": 8, "usage": 9, "error": 10,
        "prompt_logprobs": 11,
    }  # fmt: skip


def test_every_parameter_travels_in_a_field_of_its_name() -> None:
    fields = set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert fields == set(PARAMETERS) - {"pooling"}  # which Embed has, for itself
    theirs = set(vllm_engine_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert {declared.vllm for declared, _ in PARAMETERS.values() if declared.vllm} <= theirs
    of_their_own = {
        "structured", "quantize_after", "speculate", "pooling", "target_itl", "target_ttft", "stop_ids",
    }  # fmt: skip
    assert set(PARAMETERS) - theirs == of_their_own


def test_every_number_of_the_cache_service_is_kept() -> None:
    kept = {
        "Prefix": "text token_ids chat request_id cache_salt",
        "GetStatsRequest": "num_prefixes",
        "GetStatsResponse": "pages page_size policy enabled query_tokens hit_tokens misses evicted_pages "
        "pinned_pages max_pinned_pages pins prefixes residual_pages",
        "MissTokens": "reason tokens",
        "PinStats": "name num_tokens",
        "PrefixStats": "parent start end num_hits tokens_saved text",
        "ExplainRequest": "request_id",
        "ExplainResponse": "request_id prompt_tokens cached_tokens miss_position reason "
        "evicted_seconds_before misses text",
        "SaveRequest": "path prompt",
        "SaveResponse": "num_pages num_tokens num_bytes num_missing_pages",
        "LoadRequest": "path",
        "LoadResponse": "num_pages num_tokens num_known_pages num_skipped_pages converted",
        "PinRequest": "name prefix",
        "PinResponse": "num_tokens prefix_tokens pinned_pages",
        "UnpinRequest": "name",
        "UnpinResponse": "pinned_pages",
        "FlushRequest": "",
        "FlushResponse": "num_pages",
        "WatchRequest": "start_number log_id",
        "WatchResponse": "number stored removed cleared log_id",
        "PagesStored": "digests parent",
        "PagesRemoved": "digests",
        "CacheCleared": "",
    }
    messages = cache_pb2.DESCRIPTOR.message_types_by_name
    found = {name: {f.name: f.number for f in message.fields} for name, message in messages.items()}
    assert found == {
        name: {field: number for number, field in enumerate(fields.split(), 1)}
        for name, fields in kept.items()
    }
    assert [reason.name for reason in cache_pb2.DESCRIPTOR.enum_types_by_name["MissReason"].values] == [
        f"MISS_REASON_{name}"
        for name in ("UNSPECIFIED", *(reason.upper() for reason in REASONS))
    ]  # fmt: skip


def test_unset_parameters_take_the_engines_defaults() -> None:
    assert messages.params_of(pb.SamplingParams()) == SamplingParams()


def test_zero_is_not_unset() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        messages.params_of(pb.SamplingParams(max_tokens=0))
    assert messages.params_of(pb.SamplingParams(logprobs=0)).logprobs == 0
    assert messages.params_of(pb.SamplingParams(seed=0)).seed == 0


structured = st.one_of(
    st.builds(StructuredOutput, json_schema=st.sampled_from(['{"type": "integer"}', "not JSON"])),
    st.just(StructuredOutput(json_object=True)),
    st.builds(StructuredOutput, regex=st.text(max_size=5)),
    st.builds(StructuredOutput, grammar=st.text(max_size=5)),
    st.builds(StructuredOutput, choice=st.lists(st.text(min_size=1), min_size=1, max_size=3).map(tuple)),
    st.builds(StructuredOutput, structural_tag=st.just({"triggers": ["a"]})),
)
unit = st.floats(0, 1, exclude_min=True)
parameters = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=unit,
    min_p=unit,
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100), max_size=3),
    seed=st.none() | st.integers(0, 2**64 - 1),
    n=st.integers(1, 64),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=3).map(tuple),
    stop_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    structured=st.none() | structured,
)


@given(parameters)
def test_parameters_survive_the_wire(params: SamplingParams) -> None:
    sent = messages.params_message(params).SerializeToString()
    assert messages.params_of(pb.SamplingParams.FromString(sent)) == params


ids = st.integers(0, 2**32 - 1)
logprob = st.builds(
    TokenLogprob,
    token_id=ids,
    logprob=st.floats(-1e6, 0),
    top=st.lists(st.tuples(ids, st.floats(-1e6, 0)), max_size=2).map(tuple),
)
deltas = st.builds(
    Delta,
    request_id=st.text(min_size=1, max_size=8),
    index=st.integers(0, 63),
    token_ids=st.lists(ids, max_size=4).map(tuple),
    text=st.text(max_size=8),
    logprobs=st.lists(logprob, max_size=2).map(tuple),
    finish_reason=st.sampled_from([None, *FinishReason]),
    stop_match=st.none() | ids | st.text(min_size=1, max_size=4),
    prompt_logprobs=st.none() | st.builds(PromptLogprobs, ids, st.lists(logprob, max_size=2).map(tuple)),
    prompt_tokens=ids,
    cached_tokens=ids,
)


@given(deltas)
def test_deltas_survive_the_wire(delta: Delta) -> None:
    sent = messages.response_of(delta, Counter()).SerializeToString()
    assert messages.delta_of(pb.GenerateResponse.FromString(sent)) == delta


@given(deltas, st.text(min_size=1, max_size=8))
def test_what_went_wrong_survives_the_wire(delta: Delta, error: str) -> None:
    failed = replace(delta, finish_reason=FinishReason.ERROR, error=error)
    response = messages.response_of(failed, Counter())
    assert response.error.code == grpc.StatusCode.INTERNAL.value[0]
    assert messages.delta_of(pb.GenerateResponse.FromString(response.SerializeToString())) == failed


def test_prompts_survive_the_wire() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    for prompt in ("text", "", [1, 2, 3], [], chat):
        request = make_request(prompt, SamplingParams())
        received = pb.GenerateRequest.FromString(request.SerializeToString())
        assert messages.prompt_of(received, max_tokens=3) == prompt


def test_negative_token_ids_do_not_even_leave_the_client() -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        make_request([1, -1], SamplingParams())
