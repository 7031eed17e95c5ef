// What the sides of AVX-512 share.
#pragma once

#include <immintrin.h>

#include "attention/sides.h"
#include "runtime/dots_avx512.h"

namespace octavo::OCTAVO_ISA {

extern const KeySide bf16_keys;
extern const ValueSide bf16_values;

// The same, and latents in bf16, on AMX tiles. Null where the CPU has none, and for other calls.
const KeySide* tiled_keys(const AttendArgs& args);
const ValueSide* tiled_values(const AttendArgs& args);

// Codes whose integers are multiplied as such, queries and weights in fixed point of 16 bits, as good as
// float32, or of 8 (codes_avx512.h). Null for other formats.
const KeySide* code_keys(const AttendArgs& args);
const ValueSide* code_values(const AttendArgs& args);

// The same of V with a scale (and a bias) for each group of dims. Null for other formats.
const ValueSide* group_values(const AttendArgs& args);

namespace {

// body<n>(first_row) over all rows, n of 2 or 1 rows at a time: their sums stay in registers.
template <class Body>
OCTAVO_INLINE void for_pairs_of_rows(int num_rows, Body body) {
  int row = 0;
  for (; row + 2 <= num_rows; row += 2) body.template operator()<2>(row);
  if (row < num_rows) body.template operator()<1>(row);
}

// Rows of 32-bit words to columns: lane i of word j becomes lane j of word i.
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
