"""Runs a Metal kernel on the CPU and checks every access."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from metal_emulator import abi
from metal_emulator.assemble import Assembled, KernelSource, assemble
from metal_emulator.buffers import Buffers
from metal_emulator.build import build, source_lines
from metal_emulator.errors import MetalRuntimeError
from metal_emulator.tensors import Tensor
from metal_emulator.traffic import Site, Traffic, make_traffic

MAX_THREADS = 1024
DEFAULT_TIME_LIMIT_S = 60
Schedule = Literal["mixed", "random", "greedy", "reverse", "inorder"]

_running = threading.Lock()  # signal handlers and the runtime's state exist once per process


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a launch. Equal options and inputs give equal results, reports and traffic."""

    seed: int = 0
    schedule: Schedule = "mixed"  # mixed: each threadgroup is random, greedy or reverse
    checks: bool = True  # False: only guard pages and poison; finds no races
    strict: bool = True  # False: a divergent simdgroup operation runs with the lanes that reached it
    valid: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    raise_on_report: bool = True
    extra_flags: Sequence[str] = ()
    ftz: bool = True  # denormal floats are zero, as on Apple's GPUs
    time_limit_s: int = DEFAULT_TIME_LIMIT_S  # processor time after which a kernel is reported as endless


@dataclass(frozen=True, kw_only=True)
class Stats:
    compile_s: float
    run_s: float
    switches: int
    accesses: int
    gathers: int  # lanes that reached a simdgroup operation or simdgroup_barrier
    barriers: int  # threads that reached a threadgroup_barrier
    operations: Mapping[str, int]  # executions per simdgroup (threadgroup_barrier: per threadgroup)
    threadgroup_bytes: int  # the most threadgroup memory that a threadgroup used
    warnings: str


@dataclass(frozen=True, kw_only=True)
class Result:
    outputs: list[NDArray[Any]]
    reports: list[str]
    stats: Stats
    counted: Traffic | None

    @property
    def traffic(self) -> Traffic:
        """Device memory that the launch moved. Raises MetalRuntimeError if it ran without checks."""
        if self.counted is None:
            raise MetalRuntimeError("this launch ran with checks=False, which counts no traffic")
        return self.counted


def emulate(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    *,
    header: str = "",
    inputs: Sequence[Any],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[Any],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    template: Sequence[tuple[str, Any]] | None = None,
    init_value: float | None = None,
    atomic_outputs: bool = False,
    **options: Any,
) -> Result:
    """Build and run one kernel, with the arguments of `mx.fast.metal_kernel` and the fields of Options.

    Raises MetalCompileError. Raises MetalRuntimeError if the launch is impossible or, unless raise_on_report
    is False, if the run reports anything.
    """
    kernel = KernelSource(name, tuple(input_names), tuple(output_names), source, header, atomic_outputs)
    tensors = [Tensor.of(value) for value in inputs]
    assembled = assemble(kernel, tensors, output_dtypes, template or ())
    _check_launch(kernel, output_shapes, grid, threadgroup)
    buffers = Buffers(assembled, tensors, output_shapes, output_dtypes, init_value)
    return _run(assembled, buffers, grid, threadgroup, Options(**options))


class MetalKernel:
    """A kernel on the CPU, with the constructor and the call of `mx.fast.metal_kernel`.

    Both also take the fields of Options; `last` is the Result of the latest call.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        **options: Any,
    ) -> None:
        if not ensure_row_contiguous:
            raise MetalRuntimeError("ensure_row_contiguous=False: inputs are row-contiguous here")
        options.pop("compile_options", None)
        self._kernel = (name, input_names, output_names, source)
        self._options = {"header": header, "atomic_outputs": atomic_outputs, **options}
        self.last: Result | None = None

    def __call__(self, *, stream: Any = None, verbose: bool = False, **arguments: Any) -> list[NDArray[Any]]:
        del stream, verbose  # MLX has these arguments; they change nothing here
        self.last = emulate(*self._kernel, **{**self._options, **arguments})
        return self.last.outputs


def _check_launch(
    kernel: KernelSource,
    output_shapes: Sequence[Sequence[int]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> None:
    if len(output_shapes) != len(kernel.output_names):
        raise MetalRuntimeError(f"{len(output_shapes)} output_shapes for {len(kernel.output_names)} outputs")
    for what, size in (("grid", grid), ("threadgroup", threadgroup)):
        if len(size) != 3 or min(size) < 1:
            raise MetalRuntimeError(f"{what} {tuple(size)}: must be three positive numbers (of threads)")
    if math.prod(threadgroup) > MAX_THREADS:
        raise MetalRuntimeError(f"threadgroup {threadgroup}: more than {MAX_THREADS} threads")


def _run(
    assembled: Assembled,
    buffers: Buffers,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    options: Options,
) -> Result:
    started = time.perf_counter()
    built = build(assembled, checks=options.checks, extra_flags=options.extra_flags)
    compiled = time.perf_counter()
    table = buffers.table(options.valid)
    launch = _launch(table, grid, threadgroup, options)
    with _running:
        status = abi.load(built.library).msl_launch(ctypes.byref(launch))
        counted = _traffic(built.library, launch, table) if options.checks else None
    if status < 0:
        raise MetalRuntimeError("the runtime could not reserve address space for the buffers")
    name = assembled.source.name
    reports = [_report_text(name, built.library, report) for report in launch.reports[: launch.num_reports]]
    if reports and options.raise_on_report:
        raise MetalRuntimeError("\n".join(reports))
    stats = Stats(
        compile_s=compiled - started,
        run_s=time.perf_counter() - compiled,
        switches=launch.num_switches,
        accesses=launch.num_accesses,
        gathers=launch.num_gathers,
        barriers=launch.num_barriers,
        operations={
            operation.name.decode(): operation.executions
            for operation in launch.operations[: launch.num_operations]
        },
        threadgroup_bytes=launch.threadgroup_bytes,
        warnings=built.warnings,
    )
    return Result(outputs=list(buffers.outputs.values()), reports=reports, stats=stats, counted=counted)


def _launch(
    table: ctypes.Array[abi.Buffer],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    options: Options,
) -> abi.Launch:
    launch = abi.Launch()
    launch.grid[:] = grid
    launch.threadgroup[:] = [min(size, limit) for size, limit in zip(threadgroup, grid, strict=True)]
    launch.buffers, launch.num_buffers = table, len(table)
    launch.seed, launch.schedule = options.seed, abi.SCHEDULES[options.schedule]
    launch.strict, launch.checks, launch.flush_denormals = options.strict, options.checks, options.ftz
    launch.time_limit_s = options.time_limit_s
    launch.reports, launch.max_reports = (abi.Report * abi.MAX_REPORTS)(), abi.MAX_REPORTS
    return launch


def _report_text(name: str, library: Path, report: abi.Report) -> str:
    text: str = report.text.decode(errors="replace")
    if report.pc:
        text += f" at {source_lines(library, report.pc)}"
    elif report.line > 0:
        text += f" at {name}:{report.line}"
    if report.other_pc:
        text += f"; other access at {source_lines(library, report.other_pc)}"
    return text


def _traffic(library: Path, launch: abi.Launch, table: ctypes.Array[abi.Buffer]) -> Traffic:
    names = [buffer.name.decode() for buffer in table]
    sites = [
        Site(
            library=library,
            offset=site.pc,
            buffer=names[site.buffer],
            is_write=bool(site.is_write),
            executions=site.executions,
            thread_bytes=site.thread_bytes,
            bytes=site.bytes,
            lines=site.lines,
            min_lines=site.min_lines,
        )
        for site in launch.sites[: launch.num_sites]
    ]
    unique = {
        name: (buffer.unique_bytes_read, buffer.unique_bytes_written)
        for name, buffer in zip(names, table, strict=True)
    }
    return make_traffic(sites, unique)
