// Common parts of the key sides and value sides for AVX-512.
#pragma once

#include <immintrin.h>

#include "attention/sides.h"
#include "runtime/dots_avx512.h"

namespace octavo::OCTAVO_ISA {

extern const KeySide bf16_keys;
extern const ValueSide bf16_values;

// Return the sides for bf16 pages and bf16 latents on AMX; null for other calls, or if the CPU has no AMX.
const KeySide* tiled_keys(const AttendArgs& args);
const ValueSide* tiled_values(const AttendArgs& args);

namespace {

// Rounds softmax weights or queries to bf16; values below 2^-126 become 0. `count` is a multiple of 16.
inline void round_to_bf16(const float* values, int count, uint16_t* rounded) {
  for (int i = 0; i < count; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded + i),
                        (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(values + i)));
}

// Transposes 16 vectors of 32-bit words: lane i of word j becomes lane j of word i.
OCTAVO_INLINE void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
