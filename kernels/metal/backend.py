from __future__ import annotations

import logging
from functools import cached_property, partial

from ..interface import MakeAdapterTable, PagedKVCache, PoolSpec
from ..recurrent_kernels import RecurrentKernels
from ..verify.selftest import first_failure
from .adapters import MetalAdapterTable, adapter_problem
from .in_place import InPlacePool, copies_pages, overlaps_steps
from .launch import KernelLibrary
from .pool import MetalPool
from .recurrent import MetalRecurrences, recurrent_problem

log = logging.getLogger(__name__)


class MetalBackend:
    """``AttentionBackend`` on Metal. ``library`` compiles the kernels (default: MLX)."""

    name = "metal"
    has_model_ops = False
    takes_masks = False
    compiles_at_launch = True

    def __init__(self, library: KernelLibrary | None = None) -> None:
        self._library = KernelLibrary() if library is None else library
        self._writes_in_place = False
        self._recurrences: MetalRecurrences | None = None
        self._asked_for_recurrences = False

    @property
    def library(self) -> KernelLibrary:
        return self._library

    @property
    def writes_in_place(self) -> bool:
        return self._writes_in_place

    @property
    def recurrent_kernels(self) -> RecurrentKernels | None:
        """Recurrent kernels; None if they fail their self-test or the device cannot write states in place."""
        if not self._writes_in_place:
            return None
        if not self._asked_for_recurrences:
            self._asked_for_recurrences = True
            problem = recurrent_problem(self._library)
            if problem is None:
                self._recurrences = MetalRecurrences(self._library)
            else:
                log.warning(
                    "mlx-lm's operations compute recurrent layers: the Metal kernels fail their self-test on "
                    "this device (%s)",
                    problem,
                )
        return self._recurrences

    @cached_property
    def adapter_tables(self) -> MakeAdapterTable | None:
        problem = adapter_problem(self._library)
        if problem is None:
            return partial(MetalAdapterTable, self._library)
        log.warning("MLX's operations add adapters: the Metal kernels fail their self-test (%s)", problem)
        return None

    def create_pool(self, spec: PoolSpec) -> MetalPool:
        kind = InPlacePool if self._writes_in_place else MetalPool
        return kind(spec, self._library)

    def create_residual_pool(self, spec: PoolSpec, residual: PoolSpec) -> PagedKVCache:
        for layer, own in zip(spec.layers, residual.layers, strict=True):
            if layer.window is None and own.keep % residual.page_size:
                raise ValueError(
                    f"keep must be a multiple of the page size {residual.page_size} for the Metal kernels, "
                    f"got {own.keep}"
                )
        from .residual import MetalResidualCache

        return MetalResidualCache(self.create_pool(spec), self.create_pool(residual))

    def try_in_place(self) -> str:
        """Let pools write pages in place if a self-test passes; return one line about the result."""
        self._writes_in_place = True
        failure = first_failure(self)
        if failure is not None:
            failed = failure.name
        elif not copies_pages(self._library):
            failed = "pages are copied"
        elif not overlaps_steps(self._library):
            failed = "steps in flight give the same"
        else:
            return "pages are written in place"
        self._writes_in_place = False
        return f"writing pages in place failed its self-test ({failed})"
