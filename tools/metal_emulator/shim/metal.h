// Enough of the Metal Shading Language (3.1), on a host clang, to compile and run compute kernels.
//
// device, threadgroup and constant are clang's opencl_* address spaces. Mixing them is a compile error
// exactly where Metal forbids it. In the compiled code for x86 and Arm, they are one memory.
#pragma once
#if !defined(__clang__)
#error "the emulator's Metal needs clang"
#endif

#include "../runtime/abi.h"

#include "msl_types.h"
// Types come before keywords, because keywords are macros.
#include "msl_keywords.h"
// These headers are written in Metal itself.
#include "msl_math.h"
#include "msl_simdgroup.h"
#include "msl_matrix.h"
#include "msl_atomic.h"
