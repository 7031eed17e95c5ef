from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from fake_images import RULES, TEMPLATE, FakeImages, data_url, grid_of, patches_of, png
from fakes import FakeCore, byte_tokenizer
from octavo.engine.api.sampling_params import SamplingParams
from served import all_idle, collect, eventually
from vllm_worker import Worker, worker

pytestmark = pytest.mark.server

CAT, DOG = png("red"), png("blue")
MARK = RULES.token
ROWS = 6
TEXT = [*b"user:what is this?"]


def core(images: FakeImages | None = None) -> FakeCore:
    return FakeCore(tokenizer=byte_tokenizer(template=TEMPLATE), images=images or FakeImages())


def tensors(*files: bytes) -> pb.MultimodalInputs:
    from PIL import Image

    images = [np.array(Image.open(io.BytesIO(file))) for file in files]
    patches, grid = np.concatenate([patches_of(each, RULES) for each in images]), grid_of(RULES, *images)
    return pb.MultimodalInputs(
        pixel_values=pb.TensorData(shape=patches.shape, dtype="uint8", inline=patches.tobytes()),
        model_specific_tensors={
            "image_grid_thw": pb.TensorData(shape=grid.shape, dtype="int64", inline=grid.tobytes())
        },
        im_token_id=MARK,
        mm_placeholders=[{"offset": len(TEXT) + ROWS * i, "length": ROWS} for i in range(len(files))],
        mm_hashes=["0" * 64] * len(files),
        modality=common_pb2.IMAGE,
    )


def refs(*urls: str, modality: int = common_pb2.IMAGE) -> pb.MediaRefs:
    return pb.MediaRefs(items=[{"url": url, "modality": modality} for url in urls])


async def cached(its: Worker, ids: list[int], **media: Any) -> int:
    [answer] = await its.generate(ids=ids, stream=False, **media)
    assert answer.complete.prompt_tokens == len(TEXT) + ROWS + 1
    return int(answer.complete.cached_tokens)


async def test_images_in_all_forms_share_pages_whatever_their_hashes_say() -> None:
    images = FakeImages()
    expanded, short = [*TEXT, *[MARK] * ROWS, ord("|")], [*TEXT, MARK, ord("|")]
    async with worker(core(images)) as its:
        parts = [{"type": "text", "text": "what is this?"}, {"type": "image", "image": CAT}]
        chat = its.its.client.generate([{"role": "user", "content": parts}], SamplingParams(max_tokens=2))
        assert (await collect(chat))[0].cached_tokens == 0
        assert await cached(its, expanded, mm_inputs=tensors(CAT)) == 24
        assert await cached(its, short, media_refs=refs(data_url(CAT))) == 24
        assert await cached(its, expanded, mm_inputs=tensors(DOG)) == 16
    assert len(images.encoded) == 2


async def test_a_model_with_images_reports_it() -> None:
    for images, says in ((FakeImages(), True), (None, False)):
        async with worker(FakeCore(images=images)) as its:
            info = await its.stub.GetModelInfo(pb.GetModelInfoRequest())
            server = await its.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.supports_vision is says
        assert (server.mm_processor, server.mm_media_ref_schemes) == (
            ("inprocess", "data") if says else ("", "")
        )
        assert (server.mm_item_limits, server.mm_encoder_budget) == (("image=64", 1024) if says else ("", 0))
        assert server.mm_device_do_normalize is says


async def test_a_url_gets_the_tokens_that_the_model_wants_around_images() -> None:
    asked = {"ids": [ord("a"), MARK, ord("b")], "media_refs": refs(data_url(CAT)), "stream": False}
    async with worker(core(FakeImages(rules=replace(RULES, text="<~>")))) as its:
        [answer] = await its.generate(**asked)
        assert answer.complete.prompt_tokens == len("a<>b") + ROWS
    async with worker(core(FakeImages(rules=replace(RULES, text="\n~\n")))) as its:
        with pytest.raises(grpc.aio.AioRpcError, match="must be sent in chats, because they change"):
            await its.generate(**asked)


def changed(**fields: Any) -> pb.MultimodalInputs:
    made = tensors(CAT)
    made.MergeFrom(pb.MultimodalInputs(**fields))
    return made


SHM = pb.TensorData(shape=[24, 1536], dtype="uint8", shm=common_pb2.ShmHandle(name="x"))
EXPANDED = [*TEXT, *[MARK] * ROWS]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("must have one ~ for each of its 1 images, got 6", {"media_refs": refs(data_url(CAT))}),
    ("nothing is fetched", {"ids": [MARK], "media_refs": refs("https://example.com/cat.png")}),
    ("must be one of PNG", {"ids": [MARK], "media_refs": refs(data_url(b"no picture"))}),
    ("at most 64 images, got 65", {"media_refs": refs(*[data_url(CAT)] * 65)}),
    ("must have images only", {"media_refs": refs(data_url(CAT), modality=common_pb2.VIDEO)}),
    ("must have images only", {"mm_inputs": changed(modality=common_pb2.AUDIO)}),
    ("must have pixel_values, got 'patches'", {"mm_inputs": changed(encoder_input_key="patches")}),
    ("must be in the message (inline), got shm", {"mm_inputs": changed(pixel_values=SHM)}),
    ("must be in the message (inline), got none", {"mm_inputs": pb.MultimodalInputs()}),
    ("must have 6 placeholders", {"ids": EXPANDED[:-1], "mm_inputs": tensors(CAT)}),
    ("a placeholder (~, id 126) for each row", {"ids": [*EXPANDED, MARK], "mm_inputs": tensors(CAT)}),
    ("token ids in [0", {"ids": [*EXPANDED, 10**6], "mm_inputs": tensors(CAT)}),
    ("got both", {"mm_inputs": tensors(CAT), "media_refs": refs(data_url(CAT))}),
    ("extra_mm_inputs", {"mm_inputs": tensors(CAT), "extra_mm_inputs": [tensors(CAT)]}),
]


async def test_media_that_do_not_fit_cost_one_error_each() -> None:
    async with worker(core()) as its:
        for message, changes in REFUSED:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await its.generate(**{"ids": EXPANDED, **changes})
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, message
            assert message in (caught.value.details() or "")
        request = pb.GenerateRequest(text="~", mm_inputs=tensors(CAT))
        with pytest.raises(grpc.aio.AioRpcError, match="mm_inputs of a text"):
            await its.stub.Generate(request).read()
        assert its.its.num_steps == 0
        assert await its.generate(ids=EXPANDED, mm_inputs=tensors(CAT))
        await eventually(lambda: all_idle(its.its.engine), "pages are held")
