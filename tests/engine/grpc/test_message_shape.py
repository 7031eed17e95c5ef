from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from hostile_messages import field, varint
from octavo.engine.api.errors import InvalidRequest
from octavo.engine.grpc import message_shape, packed_ids
from octavo.engine.grpc.message_shape import MAX_FIELDS, SHORT_MESSAGE, parsed
from octavo.engine.grpc.packed_ids import PackedIds, ids_of
from octavo.proto import generation_pb2 as pb

PARSE: Any = pb.GenerateRequest.FromString


def chat(num_messages: int) -> bytes:
    messages = [pb.ChatMessage(role="u", content="text " * 4)] * num_messages
    return pb.GenerateRequest(chat=pb.Chat(messages=messages)).SerializeToString()


def test_as_many_fields_as_allowed_are_parsed() -> None:
    most = (MAX_FIELDS - 1) // 3
    assert len(parsed(chat(most), PARSE).chat.messages) == most
    with pytest.raises(InvalidRequest, match=f"at most {MAX_FIELDS} fields"):
        parsed(chat(most + 1), PARSE)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), st.integers(0, 5), st.booleans())
def test_many_ids_stay_packed_and_read_as_they_were(few: list[int], shift: int, has_more: bool) -> None:
    ids = [0] * shift + few * 10
    more: Any = {"sampling": pb.SamplingParams(max_tokens=3), "request_id": "a"} if has_more else {}
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_shape, "SHORT_MESSAGE", 9)
        patch.setattr(packed_ids, "_PIECE", 16)
        found = parsed(request.SerializeToString(), PARSE)
        read = list(ids_of(found.token_ids, found.token_ids.ids))
    assert len(found.token_ids.ids) == 0
    packed = ids_of(found.token_ids, found.token_ids.ids)
    assert (len(packed), packed[0], packed[-1], read) == (len(ids), ids[0], ids[-1], ids)
    found.token_ids.Clear()
    request.token_ids.Clear()
    assert found == request


def test_many_ids_are_one_list() -> None:
    def request(count: int) -> bytes:
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * count)).SerializeToString()

    long, short = request(SHORT_MESSAGE), request(10)
    found = parsed(short + long, PARSE)
    with pytest.raises(InvalidRequest, match="must be one packed list"):
        ids_of(found.token_ids, found.token_ids.ids)
    for several in (long + long, long + short, short + long + short):
        with pytest.raises(InvalidRequest, match="fields"):
            parsed(several, PARSE)


@pytest.mark.parametrize("data", [b"\x80", b"\x01\x80", b"\x80" * 11 + b"\x01", b"\x80" * 200_000])
def test_packed_ids_that_do_not_end_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not packed numbers"):
        list(PackedIds(data))
    request = field(3, field(1, data + b"\x80" * SHORT_MESSAGE))
    with pytest.raises(InvalidRequest, match="cannot be parsed"):
        parsed(request, PARSE)


def test_numbers_of_other_packed_lists_count_once_each() -> None:
    ids = list(range(200, 200 + MAX_FIELDS - 2))
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
