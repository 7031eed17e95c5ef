// Activations as float rows, the Hadamard rotation, and addresses of a page's rows. It is portable code with
// internal linkage, which each instruction set compiles for itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "attention/attention.h"
#include "runtime/numeric.h"
#include "runtime/vectors.h"

namespace octavo {
namespace {

// Largest number of dims of a row.
inline constexpr int kMaxDim = 1024;

// Loads row (token, head) of activations as `dim` floats.
inline void load_row(const RowsView& view, int64_t token, int64_t head, int dim, float* row) {
  const int64_t at = token * view.row_stride + head * view.head_stride;
  if (view.dim_stride == 1) return load_floats(view.data, view.type, size_t(at), dim, row);
  for (int i = 0; i < dim; ++i)
    load_floats(view.data, view.type, size_t(at + i * view.dim_stride), 1, row + i);
}

// Prefetches row (token, head) before it is loaded or, with kWrite, stored. Tokens are too far apart for the
// processor's own prefetchers.
template <bool kWrite = false>
inline void prefetch_row(const void* data, Float type, int64_t at, int dim) {
  const char* const from = static_cast<const char*>(data) + at * int64_t(float_size(type));
  for (int64_t byte = 0; byte < dim * int64_t(float_size(type)); byte += 64)
    __builtin_prefetch(from + byte, kWrite);
}

inline constexpr int kRowsAhead = 8;

// Hadamard steps within a vector: pairs (i, i + h) with h < kLanes. Vec must not be wider than a register,
// because compilers split shuffles of wider vectors into single elements.
inline Vec hadamard_lanes(Vec x) {
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
#pragma GCC unroll 4
  for (int h = 1; h < kLanes; h *= 2) {
#if defined(__AVX512F__)  // the product by 1 or -1 is exact, so an FMA rounds like an addition
    const IntVec one_or_minus = (lane & h) != 0 ? IntVec{} - 0x40800000 : IntVec{} + 0x3f800000;
    x = (Vec)_mm512_fmadd_ps((__m512)x, (__m512)one_or_minus, (__m512)__builtin_shuffle(x, lane ^ h));
#else
    const IntVec negative = (lane & h) != 0 ? IntVec{} + INT32_MIN : IntVec{};
    x = __builtin_shuffle(x, lane ^ h) + (Vec)((IntVec)x ^ negative);
#endif
  }
  return x;
}

#if defined(__AVX512F__)
// Rotates a row of 16 kVectors values, a power of two, in registers; bit-identical to `hadamard`.
template <int kVectors>
inline void hadamard_in_registers(float* row) {
  Vec x[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) x[i] = hadamard_lanes(load(row + i * kLanes));
#pragma GCC unroll 4
  for (int h = 1; h < kVectors; h *= 2)
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      if (i & h) continue;
      const Vec low = x[i], high = x[i + h];
      x[i] = low + high;
      x[i + h] = low - high;
    }
  const float factor = float(1 / std::sqrt(double(kVectors * kLanes)));
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) store(row + i * kLanes, x[i] * factor);
}
#endif

// Rotates in place, in blocks of b values, where b is the largest power of two that divides dim. For h = 1,
// 2, 4, ..., b / 2, each pair (i, i + h) with i & h == 0 becomes its sum and difference. Then each value is
// multiplied by float(1 / sqrt(b)). Every operation rounds (octavo.kernels.formats.rotation). The rotation is
// its own inverse.
inline void hadamard(float* row, int dim) {
#if defined(__AVX512F__)
  if (dim == 128) return hadamard_in_registers<8>(row);
  if (dim == 64) return hadamard_in_registers<4>(row);
#endif
  const int size = dim & -dim;
  int h = 1;
  if (size >= kLanes) {
    for (int i = 0; i < dim; i += kLanes) store(row + i, hadamard_lanes(load(row + i)));
    for (h = kLanes; h < size; h *= 2)
      for (int block = 0; block < dim; block += 2 * h)
        for (int i = block; i < block + h; i += kLanes) {
          const Vec low = load(row + i), high = load(row + i + h);
          store(row + i, low + high);
          store(row + i + h, low - high);
        }
  }
  for (; h < size; h *= 2)
    for (int block = 0; block < dim; block += 2 * h)
      for (int i = block; i < block + h; ++i) {
        const float low = row[i], high = row[i + h];
        row[i] = low + high;
        row[i + h] = low - high;
      }
  const float factor = float(1 / std::sqrt(double(size)));
  for (int i = 0; i < dim; ++i) row[i] *= factor;
}

// Loads row r of an item's queries, rotated like K, and prefetches a later one. Not inlined, because that
// would be once for each format.
[[gnu::noinline]] inline void load_query(const AttendArgs& args, const AttendItem& item, int r, float* row) {
  const RowFormat& format = args.layout.k;
  const RowsView& view = args.queries;
  const int group = group_size(args), next = r + kRowsAhead;
  if (next < item.num_tokens * group && view.dim_stride == 1)
    prefetch_row(view.data, view.type,
                 (item.first_token + next / group) * view.row_stride +
                     (item.kv_head * group + next % group) * view.head_stride,
                 format.dim);
  load_row(view, item.first_token + r / group, item.kv_head * group + r % group, format.dim, row);
  if (format.rotated) hadamard(row, format.dim);
}

// Copies an accumulator to the order of dims, kFloats at a time: float i of them is dim kDimOf(i). Writes
// whole vectors, because the row is read again at once.
template <int kFloats, auto kDimOf>
void to_natural(int dim, const float* accumulator, float* row) {
  struct Places {
    int of[kFloats];
    constexpr Places() : of() {
      for (int i = 0; i < kFloats; ++i) of[kDimOf(i)] = i;
    }
  };
  constexpr Places kPlaces;
  for (; dim > 0; dim -= kFloats, accumulator += kFloats, row += kFloats)
#pragma GCC unroll 16
    for (int d = 0; d < kFloats; d += kLanes) {
      Vec lanes{};
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) lanes[i] = accumulator[kPlaces.of[d + i]];
      store(row + d, lanes);
    }
}

// Return the addresses of row `offset` in a (page, head) that begins at `base`.
inline const uint8_t* k_codes(const PageLayout& layout, const uint8_t* base, int offset) {
  return base + offset * layout.k.row_bytes;
}
inline const uint8_t* k_scale(const PageLayout& layout, const uint8_t* base, int offset) {
  return base + layout.k_scales + offset * layout.k.scale_bytes;
}
inline const uint8_t* v_codes(const PageLayout& layout, const uint8_t* base, int offset) {
  return base + layout.v_codes + offset * layout.v.row_bytes;
}
inline const uint8_t* v_scale(const PageLayout& layout, const uint8_t* base, int offset) {
  return base + layout.v_scales + offset * layout.v.scale_bytes;
}

}  // namespace
}  // namespace octavo
