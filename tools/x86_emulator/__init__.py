"""AVX-512 and AMX on a CPU without them, emulated by `include/immintrin.h`.

The header computes what the instructions compute, so results can be tested, but not speed. `extension()`
builds the native extension with it. `check.cpp` compares the emulator with values worked out by hand and,
where the CPU has the instructions, with the CPU.
"""

from __future__ import annotations

from x86_emulator.build import extension, why_unavailable

__all__ = ["extension", "why_unavailable"]
