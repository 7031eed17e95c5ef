// Stands in for the compiler's <immintrin.h> where the CPU lacks AVX-512 or AMX: the very kernel sources
// are compiled against these functions, which do in plain C++ what Intel's Software Developer's Manual
// says the instructions do. First on the include path of those sources only.
//
// Stricter than the hardware where that finds bugs: a load that must be aligned is checked, a masked load
// touches nothing that its mask leaves out, tiles are checked against their configuration. What no kernel
// uses is missing, so that a new instruction is a compile error here until it has been written and tested.
#pragma once

#include "emulated_vectors.h"

#include "emulated_avx512.h"
#include "emulated_dots.h"

#include "emulated_amx.h"
