from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from attention_backends import BACKENDS, TestedBackend
from octavo.kernels.formats import page_format
from octavo.kernels.formats.base import FORMATS, register
from octavo.kernels.formats.integer import INT4
from octavo.kernels.interface import LayerSpec, PoolSpec
from octavo.kernels.reference.backend import ReferenceBackend
from octavo.kernels.verify import selftest

NAME = "signs"


@pytest.fixture(autouse=True)
def _new_format(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A format with two bits per value: -1, 0 or 1 times the row's largest."""
    integer = INT4.__bases__[0]
    constants = {
        "name": NAME,
        "code_bits": 2,
        "multiple": 16,
        "lowest": -1,
        "highest": 1,
        "scale_factor": np.float32(1),
    }
    register(type("Signs", (integer,), constants | {"describe": lambda _: "signs: -1, 0 and 1"}))
    monkeypatch.setattr(selftest, "FORMAT_NAMES", (NAME,))
    yield
    del FORMATS[NAME]


def test_the_reference_backend_computes_it_by_its_definition() -> None:
    results = selftest.run_selftest(ReferenceBackend())
    assert len(results) > 5
    assert not [result for result in results if not result.ok or "is refused" in result.name]


@pytest.mark.parametrize("tested", BACKENDS, ids=lambda tested: tested.name)
def test_a_backend_without_kernels_for_it_refuses_it(tested: TestedBackend) -> None:
    backend = tested.create()
    layer = LayerSpec(num_kv_heads=1, head_dim=64, value_dim=64)
    spec = PoolSpec(layers=(layer,), num_pages=2, page_size=8, k_format=NAME, v_format="bf16")
    if isinstance(backend, ReferenceBackend):
        assert backend.create_pool(spec).nbytes == 2 * spec.page_bytes
    else:
        with pytest.raises(ValueError, match=NAME):
            backend.create_pool(spec)


def test_two_formats_of_one_name_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="two page formats are called 'fp4'"):
        register(type(page_format("fp4")))
