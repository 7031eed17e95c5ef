// Replaces the compiler's <immintrin.h> if the CPU lacks AVX-512 or AMX. Kernels are compiled
// against these functions, which compute in plain C++ what Intel's Software Developer's Manual defines for
// the instructions. Only kernels have this folder first on their include path.
//
// The emulator is stricter than the hardware where that finds bugs. It checks aligned loads and the
// configuration of tiles, and a masked load reads nothing that its mask leaves out. Instructions that no
// kernel uses are missing, so a new one is a compile error here until it has been written and tested.
#pragma once

#include "emulated_vectors.h"

#include "emulated_avx512.h"
#include "emulated_dots.h"

#include "emulated_amx.h"
