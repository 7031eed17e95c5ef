from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from octavo.proto import cache_pb2_grpc, generation_pb2_grpc
from octavo.proto import generation_pb2 as pb

from ..api.address import parse_address
from ..api.embedding import check_dimensions
from ..api.errors import InvalidConfig, InvalidRequest, OctavoError, RequestFailed
from ..api.outputs import Delta
from ..api.prompt import ChatPrompt, EncodedPrompt, ImagePrompt, Prompt
from ..api.reranking import RankedDocument, RerankPrompt, check_top_n
from ..api.sampling_params import Pooling, SamplingParams
from ..grpc.octavo_v1.messages import delta_of, params_message
from ..grpc.server import MAX_MESSAGE_BYTES
from ..grpc.status import CODES
from ..vision.messages import bytes_of, is_picture
from ..vision.reader import PictureLimits
from .cache_client import CacheCalls
from .credentials import ClientCredentials

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Each client has its own connection, because shared connections distort benchmarks.
    ("grpc.use_local_subchannel_pool", 1),
)
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_ERRORS = {code: kind for kind, code in reversed(CODES)}


class Client:
    """Client of octavo.v1, as in ``async with Client("127.0.0.1:50051") as client``.

    Server errors are raised as Octavo's exceptions, such as InvalidRequest; EngineDead if no server answers.
    """

    def __init__(self, address: str, credentials: ClientCredentials | None = None) -> None:
        self.address = address
        credentials = credentials or ClientCredentials()
        self.metadata = credentials.metadata()
        tls = credentials.channel_credentials()
        # A proxy would resolve local addresses on its own machine.
        options = [*_OPTIONS, *([("grpc.enable_http_proxy", 0)] if _is_local(address) else [])]
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, tls, options=options)
        self.cache = CacheCalls(cache_pb2_grpc.CacheStub(self._channel), self)  # type: ignore[no-untyped-call]
        self.stub: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        salt: str = "",
        adapter: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Stream the deltas of all samples. Closing the generator cancels the request."""
        request = make_request(prompt, params, request_id=request_id, salt=salt)
        request.adapter = adapter or ""
        call = self.stub.Generate(request, timeout=timeout, metadata=self.metadata)
        async with aclosing(self.stream(call)) as responses:
            async for response in responses:
                yield delta_of(response)

    async def generate_many(
        self, requests: AsyncIterable[pb.GenerateRequest], *, timeout: float | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Stream the deltas of many requests over one call. A refused request yields an ``error`` delta."""
        call = self.stub.GenerateMany(_aiter(requests), timeout=timeout, metadata=self.metadata)
        async with aclosing(self.stream(call)) as responses:
            async for response in responses:
                yield delta_of(response)

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        salt: str = "",
        adapter: str | None = None,
    ) -> list[float]:
        SamplingParams(pooling=pooling)
        check_dimensions(dimensions)
        request = pb.EmbedRequest(
            pooling=f"POOLING_{pooling.upper()}",
            normalize=normalize,
            dimensions=dimensions,
            cache_salt=salt,
            adapter=adapter or "",
        )
        put_prompt(request, prompt)
        return list((await self._call(request)).embedding)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        prompt: RerankPrompt | None = None,
        top_n: int | None = None,
        salt: str = "",
    ) -> list[RankedDocument]:
        check_top_n(top_n)
        request = pb.RerankRequest(
            query=query,
            documents=documents,
            top_n=top_n,
            cache_salt=salt,
            **({} if prompt is None else asdict(prompt)),
        )
        reply = await self._call(request)
        return [RankedDocument(index=found.index, score=found.score) for found in reply.results]

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._call(request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return str((await self._call(pb.DetokenizeRequest(token_ids=token_ids))).text)

    async def abort(self, *request_ids: str) -> list[str]:
        """Abort requests and return the ids of the requests that were running."""
        reply = await self._call(pb.AbortRequest(request_ids=request_ids))
        return list(reply.request_ids)

    async def model_info(self) -> pb.GetModelInfoResponse:
        return cast(pb.GetModelInfoResponse, await self._call(pb.GetModelInfoRequest()))

    async def server_info(self) -> pb.GetServerInfoResponse:
        return cast(pb.GetServerInfoResponse, await self._call(pb.GetServerInfoRequest()))

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> pb.Adapter:
        """Load a LoRA adapter from a folder below the server's ``--lora-dir``."""
        request = pb.LoadAdapterRequest(name=name, path=path, replace=replace)
        reply: pb.LoadAdapterResponse = await self._call(request)
        return reply.adapter

    async def unload_adapter(self, name: str) -> None:
        await self._call(pb.UnloadAdapterRequest(name=name))

    async def adapters(self) -> list[pb.Adapter]:
        """Return the loaded adapters that this client may use."""
        return list((await self._call(pb.ListAdaptersRequest())).adapters)

    async def _call(self, request: Message) -> Any:
        return await self.unary(getattr(self.stub, type(request).__name__.removesuffix("Request")), request)

    async def unary(self, method: Any, request: Any) -> Any:
        """Call an RPC with a single response."""
        try:
            return await method(request, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise self.translate(error) from error

    async def stream(self, call: Any) -> AsyncGenerator[Any, None]:
        """Yield the responses of a call. Closing the generator cancels the call."""
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self.translate(error) from error
        finally:
            call.cancel()

    def translate(self, error: grpc.aio.AioRpcError) -> OctavoError:
        code, text = error.code(), error.details() or "no details"
        if code is grpc.StatusCode.UNAVAILABLE and "handshake" in text.lower():
            text = (
                f"the TLS handshake with {self.address} failed; check that --tls-ca is the authority of the "
                "server's certificate; if the server requires a client certificate, give --tls-cert and "
                "--tls-key"
            )
        elif code is grpc.StatusCode.UNAVAILABLE and "resol" in text.lower():
            text = f"the host of {self.address} cannot be resolved; check its spelling"
        elif code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in text.lower():
            text = f"no server answers at {self.address}; start a server there with `octavo serve --listen`"
            if not _is_local(self.address) and (proxy := next(filter(os.environ.get, _PROXIES), None)):
                text += f"; the call used the proxy of {proxy}: to avoid it, add the host to no_proxy"
        kind = _ERRORS.get(code, RequestFailed)
        return kind(text if kind is not RequestFailed else f"{code.name}: {text}")


def make_request(
    prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, salt: str = ""
) -> pb.GenerateRequest:
    """Build a request message. Raises InvalidRequest for negative token ids or invalid UTF-8."""
    try:
        request = pb.GenerateRequest(
            request_id=request_id or "", sampling=params_message(params), cache_salt=salt
        )
        put_prompt(request, prompt)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"a text cannot be written as UTF-8: {error.reason}; convert it") from error
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"a number does not fit into the request: {error}; token ids must be in [0, 2**32)"
        ) from error
    return request


def _add_message(chat: pb.Chat, message: Mapping[str, Any]) -> None:
    content = message.get("content")
    made = chat.messages.add(role=message["role"], content=content if isinstance(content, str) else "")
    for part in content if isinstance(content, list | tuple) else ():
        if is_picture(part):
            made.parts.add(image=bytes_of(part, PictureLimits().max_bytes))
        elif part.get("type") == "text":
            made.parts.add(text=part["text"])
        else:
            raise InvalidRequest(
                f'content parts must be of type "text" or "image", got {part.get("type")!r:.60}; leave it out'
            )
    made.tool_calls.extend(map(json.dumps, message.get("tool_calls") or ()))
    made.tool_call_id = message.get("tool_call_id") or ""
    made.reasoning_content = message.get("reasoning_content") or ""


def put_prompt(request: pb.GenerateRequest | pb.EmbedRequest, prompt: Prompt) -> None:
    """Set the prompt of a request message. Raises InvalidRequest for negative token ids."""
    if isinstance(prompt, str):
        request.text = prompt
        return
    if isinstance(prompt, ChatPrompt):
        if not prompt.open_turn or prompt.continue_final_message:
            raise InvalidRequest(
                "octavo.v1 always begins a new assistant turn; leave out open_turn and continue_final_message"
            )
        request.chat.tools.extend(map(json.dumps, prompt.tools or ()))
        if prompt.variables:
            request.chat.template_variables = json.dumps(dict(prompt.variables))
        prompt = prompt.messages
    if isinstance(prompt, ImagePrompt | EncodedPrompt):
        if isinstance(prompt, ImagePrompt) or prompt.images:
            raise InvalidRequest(
                "octavo.v1 accepts images only in chats, got an encoded prompt with images; send messages"
            )
        prompt = prompt.ids
    if prompt and isinstance(prompt[0], Mapping):
        request.chat.SetInParent()
        for message in prompt:
            assert isinstance(message, Mapping)
            _add_message(request.chat, message)
        return
    try:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"token ids must be in [0, 2**32), got {error}; correct the prompt") from error
    request.token_ids.SetInParent()


def _is_local(address: str) -> bool:
    try:
        return parse_address(address).is_local
    except InvalidConfig:
        return False


async def _aiter(requests: AsyncIterable[pb.GenerateRequest]) -> AsyncIterator[pb.GenerateRequest]:
    async for request in requests:
        yield request
