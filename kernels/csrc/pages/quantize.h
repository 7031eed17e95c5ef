// Conversion of rows to codes and scales, bit-identical to octavo.kernels.formats. Every float operation
// rounds once, in the order of docs/spec/page-formats.md (the build forbids contraction into FMA). Functions
// return false if a row cannot be stored; the caller then overwrites their output. Internal linkage.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention/attention.h"
#include "attention/rows.h"
#include "pages/codes.h"
#include "pages/quantize_fp5.h"
#include "pages/quantize_row.h"

#if defined(__AVX512F__)
#include "pages/quantize_avx512.h"
#endif

namespace octavo {
namespace {

// ---- 16-bit rows ----

// Stores a row of 16-bit floats; values larger than `largest` become infinity.
inline bool store_16_bits(Float type, float largest, const float* row, int dim, uint8_t* codes) {
  alignas(64) float magnitudes[kMaxDim];
  const Extent extent = load_magnitudes(row, dim, magnitudes);
  store_floats(codes, type, 0, dim, row);
  return extent.finite && extent.largest <= largest;
}

// ---- fp4 ----

// Returns the value nearest to a magnitude among {0, .5, 1, 1.5, 2, 3, 4, 6} * scale, ties to the even code.
// Products and partial sums are exact, because a scale has 11 significant bits.
inline float nearest(float magnitude, float scale) {
  float value = 0;
  value += magnitude > scale * 0.25f ? scale * 0.5f : 0.0f;
  value += magnitude >= scale * 0.75f ? scale * 0.5f : 0.0f;
  value += magnitude > scale * 1.25f ? scale * 0.5f : 0.0f;
  value += magnitude >= scale * 1.75f ? scale * 0.5f : 0.0f;
  value += magnitude > scale * 2.5f ? scale * 1.0f : 0.0f;
  value += magnitude >= scale * 3.5f ? scale * 1.0f : 0.0f;
  value += magnitude > scale * 5.0f ? scale * 2.0f : 0.0f;
  return value;
}

inline int nearest_index(float magnitude, float scale) {
  return (magnitude > scale * 0.25f) + (magnitude >= scale * 0.75f) + (magnitude > scale * 1.25f) +
         (magnitude >= scale * 1.75f) + (magnitude > scale * 2.5f) + (magnitude >= scale * 3.5f) +
         (magnitude > scale * 5.0f);
}

// Returns the sum of squared errors of a row, which is padded with zeros to `width`, a power of two.
inline float squared_error(const float* magnitudes, int width, float scale, float* errors) {
  for (int i = 0; i < width; ++i) {
    const float difference = magnitudes[i] - nearest(magnitudes[i], scale);
    errors[i] = difference * difference;
  }
  return halving_sum(errors, width);
}

// Returns the fp16 scale that gives the smallest squared error; 0 if every candidate rounds to 0.
inline uint16_t best_scale(const float* magnitudes, int width, float absmax) {
  alignas(64) float errors[kMaxDim];
  uint16_t best = 0;
  float best_error = 0;
  for (const float factor : kScaleFactors) {
    const uint16_t bits = float_to_f16(std::min(absmax * factor, kMaxHalf));
    if (bits == 0) continue;
    const float error = squared_error(magnitudes, width, f16_to_float(bits), errors);
    if (best != 0 && !(error < best_error)) continue;
    best = bits;
    best_error = error;
  }
  return best;
}

// Writes E2M1 codes of `count` values for a scale that is not 0.
inline void encode_e2m1(const float* row, const float* magnitudes, int count, float scale, uint8_t* codes) {
  alignas(64) uint8_t nibbles[kMaxDim];
  for (int i = 0; i < count; ++i)
    nibbles[i] = uint8_t(nearest_index(magnitudes[i], scale) | (std::signbit(row[i]) ? 8 : 0));
  for (int i = 0; i < count / 2; ++i) codes[i] = uint8_t(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
}

inline bool store_fp4(const float* row, int dim, uint8_t* codes, uint8_t* scale) {
  alignas(64) float magnitudes[kMaxDim];
  const int width = padded_width(dim);
  const Extent extent = load_magnitudes(row, dim, magnitudes);
  if (!extent.finite) return false;
  for (int i = dim; i < width; ++i) magnitudes[i] = 0;
  const uint16_t bits = best_scale(magnitudes, width, extent.largest);
  store_half(scale, bits);
  if (bits == 0) std::memset(codes, 0, size_t(dim) / 2);
  else encode_e2m1(row, magnitudes, dim, f16_to_float(bits), codes);
  return true;
}

// ---- mxfp4 and nvfp4 ----

inline bool store_microscaled(const float* row, int dim, bool mx, uint8_t* codes, uint8_t* scales) {
  alignas(64) float magnitudes[kMxGroup];
  bool storable = true;
  const int group = mx ? kMxGroup : kNvGroup;
  for (int at = 0; at < dim; at += group, codes += group / 2, ++scales) {
    const Extent extent = load_magnitudes(row + at, group, magnitudes);
    storable &= extent.finite;
    *scales = mx ? to_e8m0(extent.largest) : to_e4m3(extent.largest);
    const float scale = mx ? e8m0(*scales) : e4m3(*scales);
    if (scale == 0) std::memset(codes, 0, size_t(group) / 2);
    else encode_e2m1(row + at, magnitudes, group, scale, codes);
  }
  return storable;
}

// ---- int8 and int4 ----

inline bool store_integers(const float* row, int dim, int bits, uint8_t* codes, uint8_t* scale) {
  alignas(64) float magnitudes[kMaxDim];
  const Extent extent = load_magnitudes(row, dim, magnitudes);
  if (!extent.finite) return false;
  const float step = store_integer_scale(extent.largest, bits, dim, codes, scale);
  if (step == 0) return true;
  const float lowest = lowest_integer(bits), highest = highest_integer(bits);
  alignas(64) int8_t values[kMaxDim];
  for (int i = 0; i < dim; ++i)
    values[i] = int8_t(std::min(std::max(std::nearbyintf(row[i] / step), lowest), highest));
  if (bits == 8) std::memcpy(codes, values, size_t(dim));
  else
    for (int i = 0; i < dim / 2; ++i) codes[i] = uint8_t((values[2 * i] & 15) | values[2 * i + 1] << 4);
  return true;
}

// ---- affine8 and affine4 ----

inline bool store_affine_group(const float* row, int bits, uint8_t* codes, uint8_t* scales) {
  const float most = bits == 8 ? 255.0f : 15.0f;
  // The sign of a zero extreme does not matter, because the bias is then 0.
  Vec low = -load(row), high = load(row);
  for (int i = kLanes; i < kAffineGroup; i += kLanes) {
    low = largest_of(-load(row + i), low);
    high = largest_of(load(row + i), high);
  }
  const AffineGroup group(-largest_lane(low), largest_lane(high), most);
  if (!group.store(scales)) return false;
  uint8_t values[kAffineGroup];
  for (int i = 0; i < kAffineGroup; ++i)
    values[i] = uint8_t(std::min(std::max(std::nearbyintf((row[i] - group.bias) / group.step), 0.0f), most));
  if (bits == 8) std::memcpy(codes, values, kAffineGroup);
  else
    for (int i = 0; i < kAffineGroup / 2; ++i) codes[i] = uint8_t(values[2 * i] | values[2 * i + 1] << 4);
  return true;
}

inline bool store_affine(const float* row, int dim, int bits, uint8_t* codes, uint8_t* scales) {
  alignas(64) float magnitudes[kMaxDim];
  bool storable = load_magnitudes(row, dim, magnitudes).finite;
  for (int g = 0; g < dim / kAffineGroup; ++g)
    storable &=
        store_affine_group(row + g * kAffineGroup, bits, codes + g * kAffineGroup * bits / 8, scales + 4 * g);
  return storable;
}

// Stores one row in its format; if the format rotates, `row` is rotated in place first.
inline bool store_row(const RowFormat& format, float* row, uint8_t* codes, uint8_t* scales) {
  const int dim = format.dim;
  if (format.rotated) hadamard(row, dim);
#if defined(__AVX512F__)
  if (dim == 64 || dim == 128 || dim == 256) {
    const auto fp4 = dim == 64 ? store_fp4_of<4> : dim == 128 ? store_fp4_of<8> : store_fp4_of<16>;
    const auto fp5 = dim == 64 ? store_fp5_of<4> : dim == 128 ? store_fp5_of<8> : store_fp5_of<16>;
    if (format.codes == CodeType::fp4) return fp4(row, codes, scales);
    if (format.codes == CodeType::fp5) return fp5(row, codes, scales);
  }
#endif
  switch (format.codes) {
    case CodeType::bf16: return store_16_bits(Float::bf16, 0x1.fefffep127f, row, dim, codes);
    case CodeType::fp16: return store_16_bits(Float::f16, 0x1.ffdffep15f, row, dim, codes);
    case CodeType::int8: return store_integers(row, dim, 8, codes, scales);
    case CodeType::int4: return store_integers(row, dim, 4, codes, scales);
    case CodeType::fp4: return store_fp4(row, dim, codes, scales);
    case CodeType::fp5: return store_fp5(row, dim, codes, scales);
    case CodeType::mxfp4: return store_microscaled(row, dim, true, codes, scales);
    case CodeType::nvfp4: return store_microscaled(row, dim, false, codes, scales);
    case CodeType::affine8: return store_affine(row, dim, 8, codes, scales);
    case CodeType::affine4: return store_affine(row, dim, 4, codes, scales);
  }
  return false;
}

}  // namespace
}  // namespace octavo
