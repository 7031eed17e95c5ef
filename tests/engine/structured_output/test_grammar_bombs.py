from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

import grammar_bombs as bombs
from fakes import VOCAB_SIZE, byte_tokenizer
from octavo.engine.api.errors import EngineStopping, InvalidRequest, Overloaded
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.structured_output.compile_pool import TenantQueue
from octavo.engine.structured_output.compiler import ConstraintCompiler
from octavo.engine.structured_output.limits import CompileLimits

QUICK = CompileLimits(compile_s=0.3, cpu_s=1)
PATIENT = CompileLimits(compile_s=60, cpu_s=60, wall_s=60, memory_bytes=2**30, num_helpers=1)


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(byte_tokenizer(), vocab_size=VOCAB_SIZE, limits=QUICK)
    yield made
    made.close()


def make(limits: CompileLimits) -> ConstraintCompiler:
    return ConstraintCompiler(byte_tokenizer(), vocab_size=VOCAB_SIZE, limits=limits)


def num_started(compiler: ConstraintCompiler) -> int:
    return sum(helper.num_started for helper in compiler.pool.helpers)


@pytest.mark.parametrize("form", bombs.chains(1))
def test_chains_are_compiled_up_to_their_limit_and_then_refused(
    compiler: ConstraintCompiler, form: str
) -> None:
    compiler.compile(bombs.chains(490)[form])
    for length in (1_000, 3_500):
        with pytest.raises(InvalidRequest, match=r"it has \d+ .*, but at most \d+ are allowed"):
            compiler.compile(bombs.chains(length)[form])


@pytest.mark.parametrize("form", bombs.chains(1))
def test_a_chain_that_overflows_the_stack_ends_the_helper_alone(form: str) -> None:
    """A stack of 512 KiB is too small for the longest allowed chain."""
    own = make(CompileLimits(stack_bytes=512 * 1024))
    own.compile(StructuredOutput(regex="ab"))
    with pytest.raises(InvalidRequest, match=r"cannot be used: its rules are too deep or too many"):
        own.compile(bombs.chains(490)[form])
    own.compile(StructuredOutput(regex="abc"))
    assert num_started(own) == 2
    own.close()


def test_a_chain_that_is_too_long_to_count_is_refused(compiler: ConstraintCompiler) -> None:
    with pytest.raises(InvalidRequest, match="its rules are too deep or too many") as refusal:
        compiler.compile(bombs.hidden_chain(1_900))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("form", bombs.literals(1))
def test_a_string_is_bounded_in_every_form(compiler: ConstraintCompiler, form: str) -> None:
    compiler.compile(bombs.literals(4_000)[form])
    with pytest.raises(InvalidRequest, match=r"it has a literal of \d+ bytes, but at most 16384 are allowed"):
        compiler.compile(bombs.literals(17_000)[form])


def test_prose_of_a_schema_may_be_long(compiler: ConstraintCompiler) -> None:
    compiler.compile(StructuredOutput(json_schema={"type": "integer", "description": "a" * 50_000}))


def test_a_first_mask_that_takes_too_long_is_refused() -> None:
    own = make(CompileLimits(first_mask_s=1e-9))
    with pytest.raises(
        InvalidRequest, match=r"the mask of its first token takes \d+ ms, but at most 1e-06 ms"
    ):
        own.compile(StructuredOutput(regex="ab"))
    own.close()


def test_many_strings_in_one_symbol_are_refused_by_their_first_mask() -> None:
    own = make(PATIENT)
    with pytest.raises(InvalidRequest, match="the mask of its first token takes"):
        own.compile(bombs.joined_literals(16_000, 16))
    own.close()


def test_time_is_bounded_and_a_refusal_is_remembered() -> None:
    own = make(replace(QUICK, memory_bytes=2**30))
    with pytest.raises(InvalidRequest, match=r"regex cannot be used: compiling it takes .* s"):
        own.compile(bombs.slow())
    began = num_started(own)
    with pytest.raises(InvalidRequest, match="compiling it takes"):
        own.compile(bombs.slow())
    assert num_started(own) == began
    own.compile(StructuredOutput(regex="ab"))
    own.close()


def test_a_helper_that_does_not_answer_is_ended() -> None:
    own = make(PATIENT)
    own.compile(StructuredOutput(regex="a"))
    [helper] = own.pool.helpers
    assert helper._process is not None
    os.kill(helper._process.pid, signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helper, "_limits", replace(PATIENT, wall_s=0.3))
        with pytest.raises(InvalidRequest, match=r"takes more than 0\.3 s"):
            own.compile(StructuredOutput(regex="b"))
    own.compile(StructuredOutput(regex="b"))
    own.close()


def test_memory_is_bounded() -> None:
    own = make(CompileLimits(memory_bytes=16 * 2**20))
    with pytest.raises(InvalidRequest, match=r"too deep or too many: .* 16 MiB of memory"):
        own.compile(bombs.greedy())
    own.compile(StructuredOutput(regex="ab"))
    own.close()


def test_a_killed_helper_is_started_again() -> None:
    own = make(CompileLimits())
    own.compile(StructuredOutput(regex="a"))
    [helper] = own.pool.helpers
    assert helper._process is not None
    helper._process.kill()
    own.compile(StructuredOutput(regex="b"))
    assert num_started(own) == 2
    own.close()


def test_others_compile_while_one_takes_its_time() -> None:
    own = make(replace(PATIENT, num_helpers=2))
    waits = own.begin(bombs.slow(), "mallory")
    for number in range(5):
        own.compile(StructuredOutput(regex=f"a{number}"), "alice")
    assert not waits.done()
    own.forget(waits)
    own.close()


def test_a_request_that_is_given_up_frees_its_helper() -> None:
    own = make(PATIENT)
    waits = own.begin(bombs.slow())
    _until_compiling(own)
    [under_way] = own._under_way.values()
    own.forget(waits)
    assert isinstance(under_way.outcome.exception(timeout=20), EngineStopping)
    own.compile(StructuredOutput(regex="a"))
    assert num_started(own) == 2, "the process that compiled it was ended"
    own.close()


def test_equal_requests_share_a_compilation_until_all_leave() -> None:
    own = make(PATIENT)
    first, second = own.begin(bombs.slow()), own.begin(bombs.slow())
    third = own.begin(StructuredOutput(regex="abc"))
    own.forget(first)
    [under_way] = [each for key, each in own._under_way.items() if key[1] == bombs.slow().source]
    assert not under_way.is_cancelled
    own.forget(second)
    assert under_way.is_cancelled
    assert third.result(timeout=30).allowed()[ord("a")]
    own.close()


def test_the_queue_is_bounded_for_all_and_for_each_tenant() -> None:
    own = make(replace(PATIENT, max_queued=3, max_queued_per_tenant=2))
    _hold(own)
    own.begin(StructuredOutput(regex="m1"), "mallory")
    own.begin(StructuredOutput(regex="m2"), "mallory")
    with pytest.raises(
        Overloaded, match="2 schemas and grammars of yours are waiting to be compiled"
    ) as refusal:
        own.begin(StructuredOutput(regex="m3"), "mallory")
    assert refusal.value.numbers == {"waiting_compilations": 2, "max_waiting_compilations": 2}
    own.begin(StructuredOutput(regex="a1"), "alice")
    with pytest.raises(Overloaded, match="3 schemas and grammars are waiting"):
        own.begin(StructuredOutput(regex="a2"), "alice")
    own.close()


def _hold(compiler: ConstraintCompiler) -> None:
    compiler.begin(bombs.slow(), "mallory")
    end = time.monotonic() + 30
    while len(compiler.pool._queue):
        assert time.monotonic() < end
        time.sleep(0.002)


def _until_compiling(compiler: ConstraintCompiler) -> None:
    end = time.monotonic() + 30
    while not num_started(compiler):
        assert time.monotonic() < end
        time.sleep(0.002)


def test_tenants_take_turns() -> None:
    queue: TenantQueue[str] = TenantQueue(max_items=10, max_per_tenant=4)
    for item in ("m1", "m2", "m3", "a1", "b1", "a2"):
        queue.put(item, item[0])
    assert queue.remove("m2")
    assert not queue.remove("m2")
    assert [queue.take() for _ in range(5)] == ["m1", "a1", "b1", "m3", "a2"]
    queue.put("x", "x")
    assert queue.close() == ["x"]
    assert queue.take() is None


def test_closing_ends_running_and_waiting_compilations() -> None:
    own = make(PATIENT)
    running, waiting = own.begin(bombs.slow(1)), own.begin(bombs.slow(2))
    own.close()
    for waits in (running, waiting):
        with pytest.raises(EngineStopping):
            waits.result(timeout=10)
    with pytest.raises(EngineStopping, match="schemas and grammars are no longer compiled"):
        own.compile(StructuredOutput(regex="a"))
    assert not any(thread.is_alive() for thread in own.pool._threads)


PROGRAM = """
import os, sys
sys.path.insert(0, {tests!r})
import grammar_bombs as bombs
from fakes import VOCAB_SIZE, byte_tokenizer
from octavo.engine.api.structured_output import StructuredOutput
from octavo.engine.structured_output.compiler import ConstraintCompiler
from octavo.engine.structured_output.limits import CompileLimits
own = ConstraintCompiler(
    byte_tokenizer(),
    vocab_size=VOCAB_SIZE,
    limits=CompileLimits(compile_s=60, cpu_s=60, wall_s=60, memory_bytes=2**30),
)
own.compile(StructuredOutput(regex="a"))
own.begin(bombs.slow())
print(own.pool.helpers[0]._process.pid, flush=True)
{ending}
"""


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), 9)"])
def test_helpers_end_with_their_process(ending: str) -> None:
    program = PROGRAM.format(tests=os.path.dirname(bombs.__file__), ending=ending)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False, timeout=60
    )
    assert done.returncode == (-9 if ending else 0)
    pid = int(done.stdout)
    end = time.monotonic() + 20
    while _lives(pid):
        assert time.monotonic() < end, "the helper process outlives its engine's"
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
