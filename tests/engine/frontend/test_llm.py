from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fakes
from fakes import FakeCore, small_config
from octavo.engine import (
    LLM,
    AsyncEngine,
    EngineConfig,
    EngineDead,
    EngineStopping,
    FinishReason,
    InvalidConfig,
    InvalidRequest,
    ModelLoadError,
    RequestTooLong,
    SamplingParams,
)
from octavo.engine.api.stats import Observer
from octavo.engine.core.engine_core import EngineCore
from oracle import alone


def make_llm(**options: object) -> LLM:
    return LLM(small_config(), core_factory=FakeCore(**options))  # type: ignore[arg-type]


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    prompts = [list(b"prompt %d" % k) for k in range(20)]
    params = [
        SamplingParams(max_tokens=40 - k, n=1 + k % 2, seed=k, temperature=1, stop=("ab",)) for k in range(20)
    ]
    with make_llm() as llm:
        outputs = llm.generate(prompts, params)
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        assert [completion.index for completion in output.outputs] == list(range(each.n))
        for completion in output.outputs:
            assert alone(prompt, each, index=completion.index).matches(completion)
        assert output.prompt_tokens == len(prompt)
        assert 0 < output.ttft_s <= output.latency_s


def test_one_prompt_or_several_of_any_kind() -> None:
    params = SamplingParams(max_tokens=3)
    user = {"role": "user", "content": "x"}
    chat = list(b"<user>x\n<assistant>")
    with make_llm() as llm:
        for prompts, ids in (
            ("ab", [list(b"ab")]),
            (["ab", "c"], [list(b"ab"), list(b"c")]),
            ([1, 2], [[1, 2]]),
            ([[1, 2], [3]], [[1, 2], [3]]),
            (np.array([1, 2]), [[1, 2]]),
            ([np.array([1, 2]), np.array([3])], [[1, 2], [3]]),
            ([user], [chat]),
            ([[user], "ab"], [chat, list(b"ab")]),
            ([], []),
        ):
            outputs = llm.generate(prompts, params)  # type: ignore[arg-type]
            texts = [output.outputs[0].text for output in outputs]
            assert texts == [alone(prompt, params).text for prompt in ids]
        assert llm.chat([user], params)[0].prompt_tokens == len(chat)
        assert len(llm.chat([[user], [user]], params)) == 2


def test_a_list_with_one_bad_prompt_is_refused_before_anything_is_computed() -> None:
    fake = FakeCore()
    with LLM(small_config(), core_factory=fake) as llm:
        for prompts, params, error in (
            (["fine", ""], None, InvalidRequest),
            ([[1], [1] * 999], None, RequestTooLong),
            ([[1], [2]], [SamplingParams()], InvalidRequest),
        ):
            with pytest.raises(error):
                llm.generate(prompts, params)
        with pytest.raises(InvalidRequest, match="messages is empty"):
            llm.chat([])
        assert fake.runner is not None
        assert not fake.runner.num_steps


@pytest.mark.parametrize("wrong", [3, None, b"ab", {"prompt": "ab"}, {"ab"}, [None], [b"ab"], iter("ab")])
def test_invalid_prompts_are_refused(wrong: Any) -> None:
    with make_llm() as llm, pytest.raises(InvalidRequest, match=r"^a prompt must be text, .* got "):
        llm.generate(wrong)


@pytest.mark.parametrize("wrong", [3, "x", {"max_tokens": 3}, ["x"], [None]])
def test_invalid_parameters_are_refused(wrong: Any) -> None:
    with make_llm() as llm, pytest.raises(InvalidRequest, match=r"^params must be SamplingParams, got "):
        llm.generate(["ab"], wrong)


def test_an_empty_list_of_parameters_is_refused() -> None:
    with make_llm() as llm, pytest.raises(InvalidRequest, match="2 prompts came with 0 params"):
        llm.generate([[1], [2]], [])


@pytest.mark.parametrize("engine", [LLM, AsyncEngine])
def test_invalid_configurations_are_refused(engine: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"^config must be an EngineConfig, got 'demo'; write EngineConf"):
        engine("demo")


def test_a_request_that_fails_reports_it_and_the_others_continue() -> None:
    with make_llm(poison=255) as llm:
        good, bad = llm.generate([[1, 2], [3, 255]], SamplingParams(max_tokens=4))
    assert alone([1, 2], SamplingParams(max_tokens=4)).matches(good.outputs[0])
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert bad.outputs[0].error == "the ledger was poisoned"


def test_a_dead_engine_is_an_error_now_and_ever_after() -> None:
    cause = RuntimeError("device lost")

    def explode() -> None:
        raise cause

    with make_llm(before_step=explode) as llm:
        for _ in range(2):
            with pytest.raises(EngineDead, match=r"create another LLM.*device lost") as caught:
                llm.generate("x")
            assert caught.value.__cause__ is cause


def test_errors_of_loading_are_raised() -> None:
    def broken(_config: EngineConfig, _observer: Observer | None) -> EngineCore:
        raise ModelLoadError("no such model")

    with pytest.raises(ModelLoadError, match="no such model"):
        LLM(core_factory=broken)


def test_a_closed_llm_reports_it() -> None:
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(EngineStopping, match="was closed"):
        llm.generate("x")


def test_an_interrupted_batch_leaves_nothing_behind() -> None:
    fake = FakeCore()
    with LLM(small_config(), core_factory=fake) as llm:

        def interrupt(*_arguments: object) -> None:
            raise KeyboardInterrupt

        collect = llm._collect
        llm._collect = interrupt  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a"] * 4, SamplingParams(max_tokens=200))
        llm._collect = collect  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=5)
        assert alone(list(b"b"), params).matches(llm.generate("b", params)[0].outputs[0])
        assert fake.core is not None
        assert fake.core.gauges.num_running == 0


def test_a_program_that_forgets_to_close_still_ends() -> None:
    code = (
        "from fakes import FakeCore, small_config\n"
        "from octavo.engine import LLM, SamplingParams\n"
        "llm = LLM(small_config(), core_factory=FakeCore())\n"
        "print(len(llm.generate('x', SamplingParams(max_tokens=3))[0].outputs[0].token_ids))\n"
    )
    support = Path(fakes.__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=support, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stdout, result.stderr, result.returncode) == ("3\n", "", 0)


def test_closing_ends_requests_of_other_threads() -> None:
    started = threading.Event()
    llm = make_llm(before_step=started.set)
    outputs: list[FinishReason | None] = []

    def work() -> None:
        outputs.extend(
            o.outputs[0].finish_reason for o in llm.generate(["a"], SamplingParams(max_tokens=250))
        )

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(30)
    llm.close()
    thread.join()
    assert outputs in ([FinishReason.ABORT], [FinishReason.LENGTH])
