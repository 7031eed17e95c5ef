"""Messages with too many fields are refused before they are parsed; all others parse as ever."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from hostile_messages import field, varint
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.grpc import message_shape
from octavo.engine.grpc.message_shape import MAX_FIELDS, SHORT_MESSAGE, parsed
from octavo.proto import generation_pb2 as pb

PARSE: Any = pb.GenerateRequest.FromString


def chat(num_messages: int) -> bytes:
    messages = [pb.ChatMessage(role="u", content="text " * 4)] * num_messages
    return pb.GenerateRequest(chat=pb.Chat(messages=messages)).SerializeToString()


def test_as_many_fields_as_allowed_are_parsed() -> None:
    most = (MAX_FIELDS - 1) // 3  # each message is a field with two in it, and the chat is one
    assert len(parsed(chat(most), PARSE).chat.messages) == most
    with pytest.raises(InvalidRequest, match=f"at most {MAX_FIELDS} fields"):
        parsed(chat(most + 1), PARSE)


def test_token_ids_are_one_field_however_many() -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(300_000)))
    assert parsed(request.SerializeToString(), PARSE) == request


def test_numbers_of_other_packed_lists_count_once_each() -> None:
    ids = list(range(200, 200 + MAX_FIELDS - 2))  # of one and of two bytes
    request = pb.GenerateRequest(text="a" * SHORT_MESSAGE, sampling=pb.SamplingParams(stop_ids=ids[:-1]))
    assert parsed(request.SerializeToString(), PARSE) == request
    request.sampling.stop_ids.extend(range(2))
    with pytest.raises(InvalidRequest, match="fields"):
        parsed(request.SerializeToString(), PARSE)


def test_entries_of_a_map_count_once_each() -> None:
    biases = dict.fromkeys(range(MAX_FIELDS - 1), 1.0)
    request = pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias=biases))
    assert parsed(request.SerializeToString(), PARSE) == request
    biases[MAX_FIELDS] = 1.0
    request = pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias=biases))
    with pytest.raises(InvalidRequest, match="fields"):
        parsed(request.SerializeToString(), PARSE)


def test_a_short_message_cannot_have_more_fields() -> None:
    assert SHORT_MESSAGE // len(field(1, b"")) <= MAX_FIELDS


@given(st.binary(max_size=200), st.sampled_from([b"", field(4, b""), varint(9 << 3 | 3), b"\xff" * 30]))
def test_damaged_messages_are_refused_in_words(data: bytes, end: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_shape, "SHORT_MESSAGE", 0)
        try:
            expected = PARSE(data + end)
        except DecodeError:
            with pytest.raises(InvalidRequest, match=r"cannot be parsed"):
                parsed(data + end, PARSE)
        else:
            assert parsed(data + end, PARSE) == expected
