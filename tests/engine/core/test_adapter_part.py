from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fake_adapters import FakeAdapters
from fakes import FakeCore, byte_tokenizer, small_config
from octavo.engine.api.engine_request import CacheNamespace, EngineRequest
from octavo.engine.api.errors import InvalidRequest, NotFound
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.adapter_part import AdapterPart
from octavo.engine.core.engine_core import EngineCore
from octavo.engine.core.request import Request


@pytest.fixture
def adapters() -> FakeAdapters:
    return FakeAdapters(num_slots=2)


@pytest.fixture
def core(adapters: FakeAdapters) -> Iterator[EngineCore]:
    made = FakeCore(tokenizer=byte_tokenizer(), adapters=adapters)(small_config(prefix_cache=False))
    for name in ("a", "b", "c"):
        part(made).load(name, Path(f"/srv/{name}"))
    yield made
    made.finish()
    made.close()


def part(core: EngineCore) -> AdapterPart:
    (found,) = core.parts
    assert isinstance(found, AdapterPart)
    return found


def add(core: EngineCore, name: str | None, *, length: int = 3, max_tokens: int = 4, n: int = 1) -> Request:
    variant = next((info.variant for info in part(core)._adapters.infos() if info.name == name), b"")
    request = core.builder.build(
        EngineRequest(
            request_id=f"{name}",
            prompt_ids=list(range(1, length + 1)),
            params=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, n=n),
            max_tokens=max_tokens,
            arrived_at=0.0,
            namespace=CacheNamespace(variant=variant),
            adapter=name,
        )
    )
    core.add(request)
    return request


def run(core: EngineCore, steps: int = 1) -> None:
    for _ in range(steps):
        core.step()


def running(core: EngineCore) -> list[str]:
    return [each.sequence_id for each in core._scheduler._queues.running]


def test_a_request_without_a_slot_is_passed_and_served_later(
    core: EngineCore, adapters: FakeAdapters
) -> None:
    requests = [add(core, name) for name in ("a", "b", "c", None)]
    run(core)
    assert running(core) == ["a/0", "b/0", "None/0"]
    assert set(adapters.slots) == {"a", "b"}
    run(core, 12)
    assert all(request.finish_reason is not None for request in requests)
    assert not any(adapters.holders.values())


def test_rows_have_the_slots_of_their_requests(core: EngineCore, adapters: FakeAdapters) -> None:
    first = add(core, "b", length=3)
    run(core)
    add(core, None, length=2)
    add(core, "a", length=4)
    step = core._scheduler.plan(0.0)
    assert step is not None
    rows = part(core).rows(step)
    assert rows is not None
    slots = rows.inputs["adapters"]
    assert slots.shape == (7, 1, 1)
    assert slots.dtype == np.int32
    b, a = adapters.slots["b"], adapters.slots["a"]
    assert slots.ravel().tolist() == [b, 0, 0, a, a, a, a]
    assert first.finish_reason is None


def test_a_step_of_the_base_model_alone_has_no_input(core: EngineCore) -> None:
    add(core, None)
    assert not part(core).is_live
    step = core._scheduler.plan(0.0)
    assert step is not None
    assert part(core).rows(step) is None


def test_every_sample_of_a_request_holds_the_slot(core: EngineCore, adapters: FakeAdapters) -> None:
    request = add(core, "a", n=3)
    run(core, 2)
    assert adapters.holders["a"] == 3
    run(core, 6)
    assert request.finish_reason is not None
    assert adapters.holders["a"] == 0


def test_an_aborted_request_leaves_its_slot(core: EngineCore, adapters: FakeAdapters) -> None:
    requests = [add(core, name, n=2) for name in ("a", "b", "c")]
    run(core, 2)
    for request in requests:
        core.abort(request)
    assert not any(adapters.holders.values())
    assert not part(core).is_live


def test_an_adapter_in_use_cannot_be_unloaded(core: EngineCore) -> None:
    for name in ("a", "b", "c"):
        add(core, name)
    run(core)
    assert core.gauges.adapters == (8, ("a", "b"), ("c",))
    for name in ("a", "c"):
        with pytest.raises(InvalidRequest, match=f"adapter '{name}' must not be in use, got 1 unfinished"):
            part(core).unload(name)
        with pytest.raises(InvalidRequest, match=f"adapter '{name}' must not be in use, got 1 unfinished"):
            part(core).load(name, Path("/srv/other"), replace=True)
    run(core, 12)
    assert not any(core.gauges.adapters[1:])
    assert part(core).load("a", Path("/srv/other"), replace=True).digest == b"other"
    part(core).unload("a")
    with pytest.raises(NotFound, match="'a'"):
        part(core).unload("a")


def test_a_request_for_a_replaced_adapter_is_refused(core: EngineCore) -> None:
    part(core).unload("a")
    part(core).load("a", Path("/srv/other"))
    with pytest.raises(NotFound, match="was replaced while the request was read"):
        core.builder.build(
            EngineRequest(
                request_id="x",
                prompt_ids=[1],
                params=SamplingParams(),
                max_tokens=1,
                arrived_at=0.0,
                namespace=CacheNamespace(variant=b"loraa"),
                adapter="a",
            )
        )
