// Dot products that are added up where they are: GCC 12 copies the sums of its own VNNI and bf16 intrinsics
// from register to register, and spills them. A sum is a variable of its own here, because what assembly
// writes to is not taken out of an array. Internal linkage: see numeric.h.
#pragma once

#include <immintrin.h>

namespace octavo {
namespace {

// sum += products of unsigned bytes and signed ones (VPDPBUSD).
inline __attribute__((always_inline)) void add_dots(__m512i& sum, __m512i bytes, __m512i signed_bytes) {
#if defined(__AVX512VNNI__)
  __m512i to = sum;
  asm("vpdpbusd %2, %1, %0" : "+v"(to) : "v"(bytes), "v"(signed_bytes));
  sum = to;
#else  // emulated
  sum = _mm512_dpbusd_epi32(sum, bytes, signed_bytes);
#endif
}

// sum += products of pairs of bf16 (VDPBF16PS).
inline __attribute__((always_inline)) void add_dots(__m512& sum, __m512bh a, __m512bh b) {
#if defined(__AVX512VNNI__)
  __m512 to = sum;
  asm("vdpbf16ps %2, %1, %0" : "+v"(to) : "v"((__m512i)a), "v"((__m512i)b));
  sum = to;
#else
  sum = _mm512_dpbf16_ps(sum, a, b);
#endif
}

// A sum is ready here, and nothing that has an effect comes past: prefetches stay where they are written,
// where compilers would put many of them in a row.
inline __attribute__((always_inline)) void settle(__m512& sum) {
#if defined(__AVX512VNNI__)
  __m512 to = sum;
  asm volatile("" : "+v"(to));
  sum = to;
#else
  (void)sum;
#endif
}

}  // namespace
}  // namespace octavo
