from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

INPUT, OUTPUT, INITIALISED_OUTPUT = 0, 1, 2
SCHEDULES = {"mixed": 0, "random": 1, "greedy": 2, "reverse": 3, "inorder": 4}
MAX_REPORTS = 32


class Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("host", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("valid", ctypes.c_void_p),
        ("unique_bytes_read", ctypes.c_uint64),
        ("unique_bytes_written", ctypes.c_uint64),
    )


class Report(ctypes.Structure):
    _fields_ = (
        ("text", ctypes.c_char * 480),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("line", ctypes.c_int32),
        ("is_fatal", ctypes.c_int32),
    )


class Site(ctypes.Structure):
    _fields_ = (
        ("pc", ctypes.c_uint64),
        ("buffer", ctypes.c_uint32),
        ("is_write", ctypes.c_uint32),
        ("executions", ctypes.c_uint64),
        ("thread_bytes", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("lines", ctypes.c_uint64),
        ("min_lines", ctypes.c_uint64),
    )


class Operation(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 40), ("executions", ctypes.c_uint64))


class Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("buffers", ctypes.POINTER(Buffer)),
        ("seed", ctypes.c_uint64),
        ("num_buffers", ctypes.c_uint32),
        ("schedule", ctypes.c_uint32),
        ("strict", ctypes.c_uint32),
        ("checks", ctypes.c_uint32),
        ("flush_denormals", ctypes.c_uint32),
        ("time_limit_s", ctypes.c_uint32),
        ("reports", ctypes.POINTER(Report)),
        ("max_reports", ctypes.c_uint32),
        ("num_reports", ctypes.c_uint32),
        ("num_switches", ctypes.c_uint64),
        ("num_accesses", ctypes.c_uint64),
        ("num_gathers", ctypes.c_uint64),
        ("num_barriers", ctypes.c_uint64),
        ("sites", ctypes.POINTER(Site)),
        ("num_sites", ctypes.c_uint32),
        ("threadgroup_bytes", ctypes.c_uint32),
        ("operations", Operation * 48),
        ("num_operations", ctypes.c_uint32),
    )


@cache
def load(library: Path) -> ctypes.CDLL:
    """Load a compiled kernel with a separate copy of the runtime, and keep it until the process ends."""
    loaded = ctypes.CDLL(str(library))
    loaded.msl_launch.argtypes = [ctypes.POINTER(Launch)]
    size: int = loaded.msl_launch_size()
    assert size == ctypes.sizeof(Launch), f"abi.py and abi.h differ: {ctypes.sizeof(Launch)} and {size} bytes"
    return loaded
