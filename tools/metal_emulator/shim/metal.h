// Enough of the Metal Shading Language (3.1), on a host clang, to compile and run compute kernels.
//
// device, threadgroup and constant are clang's opencl_* address spaces: mixing them is a compile error
// exactly where it is one in Metal, while x86 and Arm lower them all to one memory.
#pragma once
#if !defined(__clang__)
#error "the emulator's Metal needs clang"
#endif

#include "../runtime/abi.h"

#include "msl_types.h"
// types before keywords: the latter are macros
#include "msl_keywords.h"
// then what is written in Metal itself
#include "msl_math.h"
#include "msl_simdgroup.h"
#include "msl_matrix.h"
#include "msl_atomic.h"
