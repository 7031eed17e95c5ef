from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2

from octavo.engine.api.errors import InvalidRequest
from octavo.engine.api.outputs import Delta, FinishReason, PromptLogprobs, TokenLogprob
from octavo.engine.api.prompt import ChatPrompt
from octavo.engine.api.sampling_params import PARAMETERS, SamplingParams
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.client.client import make_request
from octavo.engine.grpc.octavo_v1 import messages
from octavo.engine.observability.prometheus import MISS_REASONS
from octavo.proto import cache_pb2
from octavo.proto import generation_pb2 as pb

PROTO = Path(__file__).parents[2] / "proto"
SOURCES = ("octavo/v1/generation.proto", "octavo/v1/cache.proto")
MODULES = (pb.DESCRIPTOR, cache_pb2.DESCRIPTOR)
PROGRAMS = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
CONTRACT = Path(__file__).parent / "contract.binpb"
"""Descriptors of the released contract. A release writes the file again, in the folder ``proto``:

    python -m grpc_tools.protoc -I . --include_imports --descriptor_set_out=../tests/proto/contract.binpb \
        octavo/v1/generation.proto octavo/v1/cache.proto
"""


def known_contract() -> FileDescriptorSet:
    return FileDescriptorSet.FromString(CONTRACT.read_bytes())


def of_module(descriptor: FileDescriptor) -> FileDescriptorProto:
    file = FileDescriptorProto()
    descriptor.CopyToProto(file)
    return file


def names_of(file: FileDescriptorProto) -> dict[str, str]:
    found: dict[str, str] = {}

    def add_messages(messages: Iterable[DescriptorProto], outside: str) -> None:
        for message in messages:
            name = f"{outside}{message.name}"
            found[name] = "message"
            for field in message.field:
                kind = field.type_name or field.type
                oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
                found[f"{name}.{field.name}"] = f"{field.number} {field.label} {kind} {oneof}"
            add_enums(message.enum_type, f"{name}.")
            add_messages(message.nested_type, f"{name}.")

    def add_enums(enums: Iterable[EnumDescriptorProto], outside: str) -> None:
        for enum in enums:
            found.update({f"{outside}{enum.name}.{value.name}": f"{value.number}" for value in enum.value})

    add_messages(file.message_type, "")
    add_enums(file.enum_type, "")
    for service in file.service:
        for method in service.method:
            streams = method.client_streaming, method.server_streaming
            found[f"{service.name}.{method.name}"] = f"{method.input_type} {method.output_type} {streams}"
    return found


def breaks(known: FileDescriptorSet, now: dict[str, FileDescriptorProto]) -> list[str]:
    lost = []
    for file in known.file:
        names = names_of(now[file.name])
        lost += [name for name, meaning in names_of(file).items() if names.get(name) != meaning]
    return lost


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


def test_fields_that_clients_use_are_kept() -> None:
    """Renumbering a field breaks every client silently."""
    assert breaks(known_contract(), {file.name: of_module(file) for file in MODULES}) == []


@pytest.mark.parametrize("change", ["field", "type", "message", "enum", "rpc"])
def test_breaking_changes_are_detected(change: str) -> None:
    known, now = known_contract(), of_module(pb.DESCRIPTOR)
    message = next(each for each in now.message_type if each.name == "SamplingParams")
    if change == "field":
        message.field[0].number = 999
    elif change == "type":
        message.field[0].type = message.field[0].TYPE_STRING
    elif change == "message":
        message.name = "Sampling"
    elif change == "enum":
        now.enum_type[0].value[1].number = 999
    else:
        now.service[0].method[0].server_streaming ^= True
    assert breaks(known, {now.name: now, cache_pb2.DESCRIPTOR.name: of_module(cache_pb2.DESCRIPTOR)})


def test_buf_sees_nothing_that_breaks_a_client() -> None:
    if shutil.which("buf", path=PROGRAMS) is None:
        pytest.skip("buf is not installed: npm install -g @bufbuild/buf")
    command = [
        shutil.which("buf", path=PROGRAMS) or "buf",
        "breaking",
        str(PROTO),
        "--against",
        str(CONTRACT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_reason_of_a_miss_has_its_value() -> None:
    values = cache_pb2.DESCRIPTOR.enum_types_by_name["MissReason"].values
    assert {value.name for value in values} == {
        f"MISS_REASON_{name.upper()}" for name in ("unspecified", *MISS_REASONS)
    }


def test_every_parameter_travels_in_a_field_of_its_name() -> None:
    fields = set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert fields == set(PARAMETERS) - {"pooling"}  # Embed has pooling as a separate field
    theirs = set(vllm_engine_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert {declared.vllm for declared, _ in PARAMETERS.values() if declared.vllm} <= theirs
    of_their_own = {
        "structured", "speculate", "pooling", "target_itl", "target_ttft", "stop_ids", "max_reasoning_tokens",
        "structured_from_first_token", "bad_words", "allowed_token_ids", "num_output_tokens",
    }  # fmt: skip
    assert set(PARAMETERS) - theirs == of_their_own


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
    sent = messages.Responses().of(delta).SerializeToString()
    assert messages.delta_of(pb.GenerateResponse.FromString(sent)) == delta


@given(deltas, st.text(min_size=1, max_size=8))
def test_errors_survive_the_wire(delta: Delta, error: str) -> None:
    failed = replace(delta, finish_reason=FinishReason.ERROR, error=error)
    response = messages.Responses().of(failed)
    assert response.error.code == grpc.StatusCode.INTERNAL.value[0]
    assert messages.delta_of(pb.GenerateResponse.FromString(response.SerializeToString())) == failed


def test_prompts_survive_the_wire() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [
        *chat[:1],
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "so"},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    whole = ChatPrompt(turns, tools=tools, variables={"enable_thinking": False})
    for prompt, wanted in (
        ("text", "text"),
        ("", ""),
        ([1, 2, 3], [1, 2, 3]),
        ([], []),
        (chat, ChatPrompt(chat)),
        (whole, whole),
    ):
        request = make_request(prompt, SamplingParams())
        received = pb.GenerateRequest.FromString(request.SerializeToString())
        assert messages.prompt_of(received) == wanted


def test_negative_token_ids_do_not_even_leave_the_client() -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        make_request([1, -1], SamplingParams())


def test_log_probabilities_of_a_prompt_are_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TokenLogprob] = []
    convert = messages._logprob_fields

    def note(entry: TokenLogprob) -> dict[str, Any]:
        made.append(entry)
        return convert(entry)

    monkeypatch.setattr(messages, "_logprob_fields", note)
    found = PromptLogprobs(1, (TokenLogprob(token_id=2, logprob=-1.0, top=((2, -1.0),)),) * 3)
    responses = messages.Responses()
    for index in range(4):
        delta = Delta(request_id="r", index=index, token_ids=(1,), prompt_logprobs=found)
        assert messages.delta_of(responses.of(delta)).prompt_logprobs == found
    assert len(made) == 3
