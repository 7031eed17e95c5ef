from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

from octavo.engine.observability.prometheus import SharedAnswer

CALLERS = 20


def test_callers_that_come_while_an_answer_is_made_share_the_next_one() -> None:
    gate, came = threading.Event(), threading.Semaphore(0)
    numbers = itertools.count()
    ticks = itertools.count()

    def make() -> int:
        assert gate.wait(30)
        return next(numbers)

    def clock() -> float:
        came.release()
        return next(ticks)

    answer = SharedAnswer(make, 0.0, clock=clock)
    with ThreadPoolExecutor(CALLERS + 1) as threads:
        first = threads.submit(answer)
        for _ in range(2):
            assert came.acquire(timeout=30)
        others = [threads.submit(answer) for _ in range(CALLERS)]
        for _ in range(CALLERS):
            assert came.acquire(timeout=30)
        gate.set()
        assert first.result(30) == 0
        assert {other.result(30) for other in others} == {1}
    assert next(numbers) == 2


def test_answers_are_made_no_more_often_than_the_interval() -> None:
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    answer = SharedAnswer(lambda: now[0], 0.5, clock=lambda: now[0], sleep=sleep)
    assert answer() == 0.0
    now[0] = 0.2
    assert answer() == 0.5, "it waits until one may be made again"
    now[0] = 2.0
    assert answer() == 2.0
    assert slept == [0.3]
