from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property, partial

from ..interface import PagedKVCache, PoolSpec
from ..recurrent_kernels import RecurrentKernels
from ..verify.selftest import first_failure
from .adapters import MetalAdapterTable, adapter_problem
from .in_place_check import in_place_problem
from .launch import KernelLibrary
from .pool import MetalPool
from .recurrent import MetalRecurrences, recurrent_problem

log = logging.getLogger(__name__)


class MetalBackend:
    """``AttentionBackend`` on Metal. ``library`` compiles the kernels (default: MLX)."""

    name = "metal"
    has_model_ops = False
    takes_masks = False
    writes_in_place = True
    compiles_at_launch = True

    def __init__(self, library: KernelLibrary | None = None) -> None:
        self._library = KernelLibrary() if library is None else library

    @property
    def library(self) -> KernelLibrary:
        return self._library

    @cached_property
    def recurrent_kernels(self) -> RecurrentKernels | None:
        """Recurrent kernels; None if they fail their self-test."""
        problem = recurrent_problem(self._library)
        if problem is None:
            return MetalRecurrences(self._library)
        log.warning(
            "mlx-lm's operations compute recurrent layers: the Metal kernels fail their self-test on this "
            "device (%s)",
            problem,
        )
        return None

    @cached_property
    def adapter_tables(self) -> Callable[..., MetalAdapterTable] | None:
        problem = adapter_problem(self._library)
        if problem is None:
            return partial(MetalAdapterTable, self._library)
        log.warning("MLX's operations add adapters: the Metal kernels fail their self-test (%s)", problem)
        return None

    def create_pool(self, spec: PoolSpec) -> MetalPool:
        return MetalPool(spec, self._library)

    def create_residual_pool(self, spec: PoolSpec, residual: PoolSpec) -> PagedKVCache:
        for layer, own in zip(spec.layers, residual.layers, strict=True):
            if layer.window is None and own.keep % residual.page_size:
                raise ValueError(
                    f"keep must be a multiple of the page size {residual.page_size} for the Metal kernels, "
                    f"got {own.keep}"
                )
        from .residual import MetalResidualCache

        return MetalResidualCache(self.create_pool(spec), self.create_pool(residual))

    def find_problem(self) -> str | None:
        """Run a short self-test on this device; return the name of the first failed check."""
        failure = first_failure(self)
        return in_place_problem(self._library) if failure is None else failure.name
