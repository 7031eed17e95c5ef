// Dot products accumulated in one register. GCC 12 copies the sums of its own VNNI and bf16 intrinsics from
// register to register, and spills them. A sum is a separate variable here, because assembly's outputs are
// not moved out of an array. Internal linkage: see numeric.h.
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

// The upper and lower halves of pairs as floats. If subnormals are flushed to zero, two fused
// multiplications, the upper halves first, have the bits of VDPBF16PS.
inline __attribute__((always_inline)) __m512 upper_floats(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
inline __attribute__((always_inline)) __m512 lower_floats(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

template <class Body>
__attribute__((noinline)) void call_apart(Body& body) {
  body();
}

// Calls body() with subnormal operands and results flushed to zero, as products of bf16 pairs do. Compilers
// do not know that MXCSR affects floating point. They may move operations across its writing, but not out of
// a function that they call.
template <class Body>
inline void flushed_to_zero(Body body) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  call_apart(body);
  _mm_setcsr(before);
}

// Returns `from` in a way that hides this from compilers. Otherwise they would keep loaded values and run out
// of registers.
inline __attribute__((always_inline)) const uint8_t* read_again(const uint8_t* from) {
  asm("" : "+r"(from));
  return from;
}

// Forces the sum to be computed here, as a barrier for operations with effects. So prefetches stay where they
// are written; compilers would put many of them in a row.
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
