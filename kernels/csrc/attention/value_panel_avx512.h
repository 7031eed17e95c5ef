// V as the codes' integers, for products of bytes (VPDPBUSD). A 32-bit lane has four positions of one dim.
//
//   V panel  [16][width][4 positions]    the codes' integers
#pragma once

#include <algorithm>
#include <cstring>

#include "attention/ahead.h"
#include "attention/codes_avx512.h"
#include "attention/rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Number of dims in 64 bytes of codes; a row's accumulator has one float per dim.
template <class Code>
constexpr int kChunkDims = 512 / Code::kBits;

template <class Code>
int value_width(int dim) {
  return (dim + kChunkDims<Code> - 1) / kChunkDims<Code> * kChunkDims<Code>;
}

// Interleaves four rows to words with a byte of each: lane 4 c + k of vector m is byte 16 c + 4 m + k.
OCTAVO_INLINE void interleave(const __m512i (&rows)[4], __m512i (&quads)[4]) {
  const __m512i ab_low = _mm512_unpacklo_epi8(rows[0], rows[1]);
  const __m512i ab_high = _mm512_unpackhi_epi8(rows[0], rows[1]);
  const __m512i cd_low = _mm512_unpacklo_epi8(rows[2], rows[3]);
  const __m512i cd_high = _mm512_unpackhi_epi8(rows[2], rows[3]);
  quads[0] = _mm512_unpacklo_epi16(ab_low, cd_low), quads[1] = _mm512_unpackhi_epi16(ab_low, cd_low);
  quads[2] = _mm512_unpacklo_epi16(ab_high, cd_high), quads[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
}

// Loads bit planes of four rows, beginning with the byte of their first value. Word m of the c-th 128 bits
// has byte 4 c + m of each row.
OCTAVO_INLINE __m512i load_planes(const uint8_t* from, int64_t stride, int64_t left, bool first) {
  __m512i rows;
  if (stride == 16) {
    rows = _mm512_loadu_si512(from);
  } else {
    alignas(64) uint8_t bytes[64] = {};
    for (int t = 0; t < 4; ++t)
      std::memcpy(bytes + 16 * t, from + t * stride, size_t(std::min<int64_t>(16, left)));
    rows = _mm512_load_si512(bytes);
  }
  alignas(64) static constexpr int32_t kWords[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  alignas(16) static constexpr int8_t kBytes[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  rows = _mm512_permutexvar_epi32(_mm512_load_si512(kWords), rows);
  rows = _mm512_shuffle_epi8(
      rows, _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kBytes))));
  return first ? _mm512_maskz_mov_epi32(0xfffe, rows) : rows;  // byte 0 is the row's scale, not bits
}

// Converts code bytes of four rows to vectors whose 32-bit lanes hold one signed byte per row. kHalf selects
// the lower (0) or upper (1) eight bytes of each 128 bits. For nibbles, lane 4 c + k of vector 2 m + n is dim
// 2 (16 c + 4 m + k) + n.
template <class Code, int kHalf>
OCTAVO_INLINE void expand_half(const __m512i (&rows)[4], const Lookup<Code, 0>& lookup, __m512i planes,
                               __m512i* to) {
  const auto bytes = [](__m512i a, __m512i b) {
    return kHalf == 0 ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b);
  };
  const __m512i ab = bytes(rows[0], rows[1]), cd = bytes(rows[2], rows[3]);
  // Mask of bit 2 k for lane k of each 128 bits, because the lane reads bits 2 k and 2 k + 1 of its byte.
  const __m512i low_bit =
      _mm512_broadcast_i32x4(_mm_setr_epi32(0x01010101, 0x04040404, 0x10101010, 0x40404040));
  constexpr auto kFirst = _MM_PERM_ENUM(0x55 * 2 * kHalf), kSecond = _MM_PERM_ENUM(0x55 * (2 * kHalf + 1));
  lookup.expand(_mm512_unpacklo_epi16(ab, cd), Code::kPlanes ? _mm512_shuffle_epi32(planes, kFirst) : planes,
                low_bit, to[0], to[1]);
  lookup.expand(_mm512_unpackhi_epi16(ab, cd), Code::kPlanes ? _mm512_shuffle_epi32(planes, kSecond) : planes,
                low_bit, to[2], to[3]);
}

template <class Code>
OCTAVO_INLINE void expand_values(const __m512i (&rows)[4], const Lookup<Code, 0>& lookup, __m512i planes,
                                 __m512i* to) {
  expand_half<Code, 0>(rows, lookup, planes, to);
  expand_half<Code, 1>(rows, lookup, planes, to + 4);
}

template <class Code>
void load_values(const PageLayout& layout, const Tile& tile, __m512i* panel) {
  const Lookup<Code, 0> lookup;
  const int64_t row_bytes = layout.v.row_bytes, scale_bytes = layout.v.scale_bytes;
  const int num_vectors = value_width<Code>(layout.v.dim) / 16;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block &block = tile.blocks[b], &next = tile.next[b];
    if (block.base == nullptr) continue;
    const uint8_t* from = v_codes(layout, block.base, block.offset);
    const uint8_t* of_rows = v_scale(layout, block.base, block.offset);
    if (next.base != nullptr) {
      prefetch(v_codes(layout, next.base, next.offset), 16 * row_bytes);
      prefetch(v_scale(layout, next.base, next.offset), 16 * scale_bytes);
    }
    for (int64_t byte = 0; byte < row_bytes; byte += 64) {
      const int64_t count = std::min<int64_t>(64, row_bytes - byte);
      const __mmask64 valid = ~uint64_t(0) >> (64 - count);
      for (int quad = 0; quad < 4; ++quad) {
        __m512i rows[4];
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t)
          rows[t] = _mm512_maskz_loadu_epi8(valid, from + (4 * quad + t) * row_bytes + byte);
        __m512i* const to = panel + size_t(4 * b + quad) * num_vectors + byte / 64 * (kChunkDims<Code> / 16);
        if constexpr (Code::kBits == 8) {
          __m512i quads[4];
          interleave(rows, quads);
#pragma GCC unroll 4
          for (int m = 0; m < 4; ++m) to[m] = quads[m];
        } else {
          __m512i planes = rows[0];
          if constexpr (Code::kPlanes)
            planes = load_planes(of_rows + 4 * quad * scale_bytes + byte / 4, scale_bytes,
                                 scale_bytes - byte / 4, byte == 0);
          expand_values<Code>(rows, lookup, planes, to);
        }
      }
    }
  }
}

// Values of four positions, read from a panel four vectors at a time.
struct PanelValues {
  const __m512i* panel;
  int num_vectors;

  __attribute__((always_inline)) void load(int b, int quad, int vector, __m512i (&values)[4]) const {
    const __m512i* const from = panel + size_t(4 * b + quad) * num_vectors + vector;
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) values[v] = from[v];
  }
};

// Vectors like those of PanelValues, converted from pages at each read. Every four positions also prefetch
// some lines of later rows.
template <class Code>
struct DirectValues {
  static constexpr int kHalves = 8 / Code::kBits;  // halves of 64 bytes, four vectors each

  const PageLayout& layout;
  const Tile& tile;
  int num_vectors;
  Ahead aheads[kBlocks];
  Lookup<Code, 0> lookup;

  // `first`: whether these rows are the first to read this tile.
  DirectValues(const PageLayout& layout, const Tile& tile, bool first)
      : layout(layout),
        tile(tile),
        num_vectors(value_width<Code>(layout.v.dim) / 16),
        aheads{ahead_of(0, first), ahead_of(1, first), ahead_of(2, first), ahead_of(3, first)} {
    for (const Tile::Block& next : tile.next)
      if (first && next.base != nullptr)
        prefetch(v_scale(layout, next.base, next.offset), 16 * layout.v.scale_bytes);
  }

  __attribute__((always_inline)) void load(int b, int quad, int vector, __m512i (&values)[4]) const {
    aheads[b].prefetch_part(vector + quad, num_vectors);
    if (kHalves == 1 || vector % 8 == 0) load_half<0>(b, quad, vector, values);
    else load_half<1>(b, quad, vector, values);
  }

 private:
  Ahead ahead_of(int b, bool first) const {
    const Tile none{};
    return Ahead(layout, first ? tile : none, 3 * kBlocks + b);
  }

  template <int kHalf>
  __attribute__((always_inline)) void load_half(int b, int quad, int vector, __m512i (&values)[4]) const {
    const int64_t row_bytes = layout.v.row_bytes, byte = vector / 4 / kHalves * 64;
    const __mmask64 valid = ~uint64_t(0) >> (64 - std::min<int64_t>(64, row_bytes - byte));
    const Tile::Block& block = tile.blocks[b];
    const uint8_t* const from = v_codes(layout, block.base, block.offset) + 4 * quad * row_bytes + byte;
    __m512i rows[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) rows[t] = _mm512_maskz_loadu_epi8(valid, from + t * row_bytes);
    if constexpr (Code::kBits == 8) {
      interleave(rows, values);
    } else {
      __m512i planes = rows[0];
      if constexpr (Code::kPlanes) {
        const int64_t stride = layout.v.scale_bytes;
        planes = load_planes(v_scale(layout, block.base, block.offset) + 4 * quad * stride + byte / 4, stride,
                             stride - byte / 4, byte == 0);
      }
      expand_half<Code, kHalf>(rows, lookup, planes, values);
    }
  }
};

OCTAVO_INLINE void add_sums(__m512i sums, __m512 factor, float* to) {
  _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), factor, _mm512_loadu_ps(to)));
}

// Returns the dim of float i of 64 bytes of codes. Lane 4 c + k of vector m is byte 16 c + 4 m + k; nibbles
// have two vectors for each m, the second for the high ones.
template <class Code>
constexpr int dim_of(int i) {
  constexpr int kEach = 8 / Code::kBits;
  const int lane = i % 16, vector = i / 16;
  return kEach * (lane / 4 * 16 + vector / kEach * 4 + lane % 4) + vector % kEach;
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
