from __future__ import annotations

import contextlib

import pytest

from octavo.engine.api.errors import Overloaded
from octavo.engine.api.tenant import NO_TENANT, Tenant
from octavo.engine.frontend.holders import Holders


def test_holders_are_counted_until_their_block_ends() -> None:
    calls = Holders("calls", "calls are being served", 2)
    with calls.hold(NO_TENANT), calls.hold(NO_TENANT):
        assert calls.total == 2
        with pytest.raises(Overloaded, match="2 calls are being served, but at most 2 are") as caught:
            calls.hold(NO_TENANT).__enter__()
        assert caught.value.numbers == {"calls": 2, "max_calls": 2}
    with contextlib.suppress(ZeroDivisionError), calls.hold(NO_TENANT):
        raise ZeroDivisionError
    assert calls.total == 0


def test_a_tenant_may_hold_its_share_only() -> None:
    calls = Holders("calls", "calls are being served", 4)
    mallory, alice = Tenant("mallory", 0.5), Tenant("alice", 0.5)
    with calls.hold(mallory), calls.hold(mallory):
        with pytest.raises(Overloaded, match="2 calls are being served, but at most 2 of one tenant"):
            calls.hold(mallory).__enter__()
        with calls.hold(alice):
            assert calls.total == 3
    with calls.hold(mallory):
        assert calls.total == 1
