"""AVX-512 and AMX on a CPU without them: the kernels' own sources, compiled against `include/immintrin.h`.

That header does in plain C++ what the instructions do, so a *right result* here is one of the kernel's
code, and says nothing about its speed. `extension()` builds the whole native extension that way
(CMake's OCTAVO_EMULATE_X86); `check.cpp` holds values worked out by hand, and is run against the
emulator and, where the CPU has the instructions, against those.
"""

from __future__ import annotations

from x86_emulator.build import extension, why_unavailable

__all__ = ["extension", "why_unavailable"]
