// Dot products added to a register, in assembly. With its VNNI and bf16 intrinsics, GCC 12 would copy sums
// between registers and spill them. Each sum must be a separate variable: array elements that are outputs of
// assembly stay in memory. Internal linkage: see numeric.h.
#pragma once

#include <immintrin.h>

namespace octavo {
namespace {

// Adds products of unsigned and signed bytes to sum (VPDPBUSD).
inline __attribute__((always_inline)) void add_dots(__m512i& sum, __m512i bytes, __m512i signed_bytes) {
#if defined(__AVX512VNNI__)
  __m512i to = sum;
  asm("vpdpbusd %2, %1, %0" : "+v"(to) : "v"(bytes), "v"(signed_bytes));
  sum = to;
#else  // emulated
  sum = _mm512_dpbusd_epi32(sum, bytes, signed_bytes);
#endif
}

// Adds products of pairs of bf16 to sum (VDPBF16PS).
inline __attribute__((always_inline)) void add_dots(__m512& sum, __m512bh a, __m512bh b) {
#if defined(__AVX512VNNI__)
  __m512 to = sum;
  asm("vdpbf16ps %2, %1, %0" : "+v"(to) : "v"((__m512i)a), "v"((__m512i)b));
  sum = to;
#else
  sum = _mm512_dpbf16_ps(sum, a, b);
#endif
}

// Return the upper (or lower) bf16 of each pair as a float. An FMA of the upper floats and then one of the
// lower floats is bit-identical to VDPBF16PS if subnormals are flushed to zero.
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

// Calls body() with subnormal operands and results flushed to zero, as VDPBF16PS does. Compilers may move
// operations across a write of MXCSR, because they do not know its effect, but not out of a function that is
// not inlined.
template <class Body>
inline void flushed_to_zero(Body body) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  call_apart(body);
  _mm_setcsr(before);
}

// Returns `from` in a way that compilers cannot trace. Otherwise they would keep loaded values in registers
// and run out of them.
inline __attribute__((always_inline)) const uint8_t* read_again(const uint8_t* from) {
  asm("" : "+r"(from));
  return from;
}

// Forces the sum to be computed here. Prefetches then stay between products, instead of being grouped by the
// compiler.
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
