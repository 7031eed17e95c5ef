"""AVX-512 and AMX on a CPU without them: the kernels' own sources, compiled against `include/immintrin.h`.

That header does in plain C++ what the instructions do. So a right result shows that the kernel's code
is right, but nothing about its speed. `extension()` builds the whole native extension that way (CMake's
OCTAVO_EMULATE_X86). `check.cpp` compares the emulator with values worked out by hand and, on a CPU that
has the instructions, checks the instructions in the same way.
"""

from __future__ import annotations

from x86_emulator.build import extension, why_unavailable

__all__ = ["extension", "why_unavailable"]
