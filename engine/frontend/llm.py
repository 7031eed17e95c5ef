from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

from tqdm import tqdm

from ..api.config import EngineConfig, checked
from ..api.embedding import check_dimensions, finished
from ..api.engine_info import AdapterInfo, EngineInfo
from ..api.engine_request import EngineOutput, EngineRequest
from ..api.errors import EngineDead, EngineStopping, InvalidRequest, RequestFailed
from ..api.output_collector import OutputCollector, completion_of
from ..api.outputs import Delta, FinishReason, RequestOutput
from ..api.prompt import ChatPrompt, EncodedPrompt, ImagePrompt, Message, Prompt
from ..api.reranking import RankedDocument, RerankPrompt, check_top_n, ranked
from ..api.sampling_params import Pooling, SamplingParams
from ..api.stats import Observer
from ..chat.answer import whole_answer
from ..chat.tool_choice import tool_use
from ..core import commands
from ..core.commands import AnswerT, Command
from ..core.engine_core import EngineCore
from ..core.engine_thread import EngineThread
from ..core.snapshots import LoadedPages, SavedPages, load, save_prompt
from ..tokenizer.tokenizer import Tokenizer
from .input_processor import InputProcessor, check_params, check_prompt

CoreFactory: TypeAlias = Callable[[EngineConfig, Observer | None], EngineCore]


class LLM:
    """Loads a model and generates text for lists of prompts. The prompts of a list run concurrently.

    Use the object as a context manager, or call ``close``. Calls from several threads run one at a time.
    If the engine itself fails, the current call and all later calls raise EngineDead.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        core_factory: CoreFactory | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Load the model. Raises ModelLoadError or InvalidConfig."""
        if core_factory is None:
            from ..core.build import build_core

            core_factory = build_core
        self._events = _Events()
        make_core = functools.partial(core_factory, checked(config or EngineConfig()), observer)
        self._thread = EngineThread(make_core, self._events)
        self._closed = False
        self._turn = threading.Lock()
        self._thread.start()
        self._events.wait_ready()
        engine = self._thread
        self.info: EngineInfo = engine.info
        self.tokenizer: Tokenizer = engine.tokenizer
        self._input = InputProcessor(engine, cut_max_tokens=config is not None and config.cut_max_tokens)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate one output per prompt, in the order of the prompts.

        prompts    one prompt or a list: text, token ids, or chat messages
        params     sampling parameters for all prompts, or one per prompt
        adapter    name of a loaded adapter for all prompts, or one per prompt; None for the base model
        progress   whether to show a progress bar (None: only on a terminal)

        Raises InvalidRequest before any computation if a prompt is invalid. If a request fails later, its
        output has the finish reason ERROR, and the other requests continue.
        """
        if self._closed:
            raise EngineStopping("this LLM was closed; create another LLM")
        requests = self._admit(_as_list(prompts), params, adapter)
        collectors = {request.number: _Collector(request) for request in requests}
        bar = tqdm(total=len(collectors), unit="prompt", disable=None if progress is None else not progress)
        with self._turn, bar:
            for request in requests:
                self._thread.add(request)
            try:
                self._collect(collectors, bar.update)
            finally:  # after an interrupt, abort the remaining requests
                for collector in collectors.values():
                    if not collector.is_done:
                        self._thread.abort(collector.request.number)
        return [collector.output() for collector in collectors.values()]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool | None = None,
    ) -> list[list[float]]:
        """Return one embedding per prompt, in order, from the last hidden states.

        pooling     "last": state of the last token; "mean": mean of all states
        normalize   scale each embedding to length 1
        dimensions  number of leading values to keep (Matryoshka embeddings; None: all)
        adapter     name of a loaded adapter for all prompts, or one per prompt

        Raises InvalidRequest, and RequestFailed if a prompt fails.
        """
        check_dimensions(dimensions)
        params = SamplingParams(max_tokens=1, ignore_eos=True, pooling=pooling)
        vectors = []
        for output in self.generate(prompts, params, adapter=adapter, progress=progress):
            if output.embedding is None:
                raise RequestFailed(output.outputs[0].error or "the request ended without an embedding")
            vectors.append(finished(output.embedding, dimensions=dimensions, normalize=normalize))
        return vectors

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        prompt: RerankPrompt | None = None,
        top_n: int | None = None,
        progress: bool | None = None,
    ) -> list[RankedDocument]:
        """Return documents by the probability that they answer the query, best first.

        prompt  question to the model (None: the prompt of Qwen3-Reranker)
        top_n   number of documents to return (None: all)

        Raises InvalidRequest, and RequestFailed if a document fails.
        """
        check_top_n(top_n)
        prompt = prompt or RerankPrompt()
        answers = prompt.answers(functools.partial(self.tokenizer.encode, add_special_tokens=False))
        scores = []
        for output in self.generate(prompt.prompts(query, documents), answers.params(), progress=progress):
            sample = output.outputs[0]
            if sample.finish_reason is FinishReason.ERROR:
                raise RequestFailed(sample.error or "a document could not be scored")
            scores.append(answers.score(sample.logprobs))
        return ranked(scores, top_n)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate an answer to one or several conversations, with the model's chat template.

        In each output, ``answer`` has the content, the reasoning and the tool calls.

        tools                 functions that the model may call, in OpenAI's format
        tool_choice           "auto", "none", "required" or a tool
        parallel_tool_calls   whether an answer may have several calls
        chat_template_kwargs  further template variables, such as enable_thinking
        adapter               name of a loaded adapter for all conversations, or one per conversation
        """
        if not messages:
            raise InvalidRequest("messages is empty; give at least one message")
        chats = _as_list(messages)
        given = _for_each(SamplingParams() if params is None else params, len(chats), "params")
        for each in given:
            check_params(each)
        uses = [
            tool_use(self.tokenizer, tools, tool_choice, each, is_parallel=parallel_tool_calls)
            for each in given
        ]
        shown = uses[0].shown or None
        prompts = [
            self._input.encode(
                ChatPrompt(cast(Sequence[Message], chat), tools=shown, variables=chat_template_kwargs or {})
            )
            for chat in chats
        ]
        has_marks = bool(self.tokenizer.chat_format.marks)
        asked = [
            replace(use.applied(each), skip_special_tokens=each.skip_special_tokens and not has_marks)
            for each, use in zip(given, uses, strict=True)
        ]
        outputs = self.generate(prompts, asked, adapter=adapter, progress=progress)
        for encoded, use, output in zip(prompts, uses, outputs, strict=True):
            for sample in output.outputs:
                was_cut = sample.finish_reason is FinishReason.LENGTH
                reader = use.reader(self.tokenizer, encoded.ids)
                sample.answer = whole_answer(reader, sample.text, was_cut=was_cut)
        return outputs

    def load_adapter(self, name: str, folder: Path | str, *, replace: bool = False) -> AdapterInfo:
        """Load a LoRA adapter saved by mlx-lm or PEFT. ``replace`` allows replacing a loaded adapter.

        Raises InvalidRequest if the adapter is unsupported or the replaced adapter is in use. Raises
        NotConfigured if this LLM has no memory for adapters.
        """
        info = self._run_command(commands.load_adapter(name, str(folder), replace))
        self._input.adapters[name] = info
        return info

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Raises NotFound for an unknown name, and InvalidRequest if it is in use."""
        self._run_command(commands.unload_adapter(name))
        self._input.adapters.pop(name, None)

    def save_prompt(self, prompt: Prompt, path: Path | str) -> SavedPages:
        """Save the full KV pages of a prompt to a new ``.safetensors`` file. Missing pages are computed
        first. Raises InvalidRequest, NotFound, NotConfigured or RequestFailed."""
        encoded = self._input.encode(prompt)
        self._run_command(commands.get_page_layout())
        self.generate(encoded, SamplingParams(max_tokens=1), progress=False)
        return save_prompt(self._run_command, Path(path), encoded.ids, b"", encoded.media)

    def load_prompt(self, path: Path | str) -> LoadedPages:
        """Load KV pages from a file of ``save_prompt``. Other page formats and page sizes are converted.

        Raises InvalidRequest for a damaged file or another model, and NotFound for a missing file.
        """
        return load(self._run_command, Path(path))

    def _run_command(self, command: Command[AnswerT]) -> AnswerT:
        return self._thread.run_command(command).result()

    def close(self) -> None:
        """End the engine and free its memory. May be called repeatedly."""
        self._closed = True
        self._input.grammars.close()
        self._input.close()
        self._thread.stop()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _admit(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[EngineRequest]:
        names = _for_each(adapter, len(prompts), "adapters")
        given = _for_each(SamplingParams() if params is None else params, len(prompts), "params")
        for each in given:
            check_params(each)
        requests: list[EngineRequest] = []
        grammar = None
        try:
            for index, (prompt, each, name) in enumerate(zip(prompts, given, names, strict=True)):
                encoded = self._input.encode(prompt)
                grammar = self._input.compile(each)
                requests.append(
                    self._input.admit(encoded, each, request_id=str(index), grammar=grammar, adapter=name)
                )
        except BaseException:
            for ticket in (grammar, *(request.grammar for request in requests)):
                self._input.grammars.drop(ticket)
            raise
        return requests

    def _collect(self, collectors: dict[int, _Collector], done: Callable[[int], object]) -> None:
        num_open = len(collectors)
        while num_open:
            for number, delta in self._events.wait_outputs():
                if (collector := collectors.get(number)) is None:
                    continue
                collector.add(delta)
                if collector.is_done:
                    num_open -= 1
                    done(1)


class _Events:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[bool | list[EngineOutput] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None

    def ready(self) -> None:
        self._queue.put(True)

    def cache_changed(self) -> None: ...

    def outputs(self, outputs: list[EngineOutput]) -> None:
        self._queue.put(outputs)

    def ended(self, error: BaseException | None) -> None:
        self._error = error
        self._queue.put(None)

    def wait_ready(self) -> None:
        if not self._queue.get():
            assert self._error is not None
            raise self._error

    def wait_outputs(self) -> list[EngineOutput]:
        outputs = self._queue.get()
        if isinstance(outputs, list):
            return outputs
        self._queue.put(None)
        if self._error is None:
            raise EngineStopping("this LLM was closed while it was generating")
        raise EngineDead(f"the engine has failed, so create another LLM: {self._error!r}") from self._error


class _Collector:
    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self._samples = [OutputCollector() for _ in range(request.params.n)]
        self._wholes: dict[int, Delta] = {}
        self._first_at: float | None = None
        self._done_at = request.arrived_at

    @property
    def is_done(self) -> bool:
        return len(self._wholes) == len(self._samples)

    def add(self, delta: Delta) -> None:
        if self._first_at is None and delta.token_ids:
            self._first_at = time.monotonic()
        sample = self._samples[delta.index]
        sample.add(delta)
        if sample.is_finished:
            self._wholes[delta.index] = sample.take()
            self._done_at = time.monotonic()

    def output(self) -> RequestOutput:
        arrived_at, first_at = self.request.arrived_at, self._first_at
        wholes = [self._wholes[index] for index in range(len(self._samples))]
        return RequestOutput(
            request_id=self.request.request_id,
            outputs=[completion_of(whole) for whole in wholes],
            prompt_tokens=self.request.num_prompt,
            cached_tokens=max(whole.cached_tokens for whole in wholes),
            ttft_s=(self._done_at if first_at is None else first_at) - arrived_at,
            latency_s=self._done_at - arrived_at,
            prompt_logprobs=next((w.prompt_logprobs for w in wholes if w.prompt_logprobs), None),
            embedding=next((w.embedding for w in wholes if w.embedding), None),
        )


def _for_each(given: Any, count: int, what: str) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest(
            f"{count} prompts came with {len(given)} {what}; give one for all, or one per prompt"
        )
    return list(given)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    check_prompt(prompts)
    if isinstance(prompts, str | ChatPrompt | ImagePrompt | EncodedPrompt) or (
        len(prompts) and isinstance(prompts[0], Integral | Mapping)
    ):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))
