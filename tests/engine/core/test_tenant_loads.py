from __future__ import annotations

from core_harness import Harness
from fakes import small_config
from octavo.engine.api.sampling_params import SamplingParams
from octavo.engine.core.gauge_source import MEASURED_EVERY_S, TenantLoads


def test_tenants_are_charged_for_computed_and_generated_tokens() -> None:
    harness = Harness(small_config(max_running=1))
    for tenant, prompt in (("a", b"abcdefghi"), ("a", b"abcdefghi"), ("b", b"bb"), ("", b"cc")):
        harness.add(prompt, SamplingParams(max_tokens=3, ignore_eos=True), tenant=tenant)
    harness.step()
    assert harness.core.gauges.tenants == {}, "looked at before anybody came, and then once in a second"
    harness.run()
    assert harness.core.gauges.tenants == {}
    counts = [record.tenant_tokens for record in harness.observer.records]
    assert {name for each in counts for name in each} == {"a", "b"}
    totals = {
        name: tuple(sum(each[name][kind] for each in counts if name in each) for kind in (0, 1))
        for name in ("a", "b")
    }
    assert totals == {"a": (9 + 1, 6), "b": (2, 3)}, "of the second prompt two pages of four were cached"


def test_loads_are_measured_once_in_a_second_and_when_all_is_done() -> None:
    now = 0.0
    harness = Harness(small_config(max_running=1))
    loads = TenantLoads(harness.core._scheduler, lambda: now)
    assert loads.measure() == {}
    for _ in range(3):
        harness.add(b"abc", SamplingParams(max_tokens=9, ignore_eos=True), tenant="a")
    harness.add(b"abc", SamplingParams(max_tokens=9, ignore_eos=True))
    harness.step()
    assert loads.measure() == {}, "not yet"
    now += MEASURED_EVERY_S
    assert loads.measure() == {"a": (1, 2)}
    assert loads.measure() is loads.measure()
    harness.run()
    assert loads.measure() == {}
