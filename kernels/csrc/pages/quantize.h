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

// Stores `count` codes, one per byte, in `bits` bits each.
inline void pack_codes(const uint8_t* values, int count, int bits, uint8_t* codes) {
  if (bits == 8) std::memcpy(codes, values, size_t(count));
  else
    for (int i = 0; i < count / 2; ++i) codes[i] = uint8_t((values[2 * i] & 15) | values[2 * i + 1] << 4);
}

// ---- fp4 and fp5 ----

// Returns the E2M2 magnitude (E2M1 if kCoarse) nearest to magnitude / scale, ties to the even index. Rounding
// the quotient does not move it across an edge, because edges have few bits, and scales at most 11.
template <bool kCoarse>
inline float nearest(float magnitude, float scale) {
  const float quotient = std::min(8.0f, magnitude / scale);  // 8 also for NaN
  const float power = as_float(as_bits(std::max(quotient, 1.0f)) & 0x7f800000);
  const float magic =
      power * (kCoarse ? 0x1.8p22f : 0x1.8p21f);  // its last bit is the distance of neighbours
  return std::min((quotient + magic) - magic, kCoarse ? 6.0f : 7.0f);
}

template <bool kCoarse>
inline void squared_errors(const float* magnitudes, int first, int end, float scale, float* errors) {
  for (int i = first; i < end; ++i) {
    const float difference = magnitudes[i] - scale * nearest<kCoarse>(magnitudes[i], scale);
    errors[i] = difference * difference;
  }
}

// Returns the candidate scale with the smallest squared error, of which the first `coarse` values have E2M1
// codes; 0 if every candidate is 0.
template <class Format>
inline typename Format::Scale best_scale(const float* magnitudes, int dim, int coarse, float largest) {
  alignas(64) float errors[kMaxDim];
  const int width = padded_width(dim);
  typename Format::Scale best = 0;
  float least = 0;
  for (int c = 0; c < kCandidates; ++c) {
    const auto candidate = Format::candidate(largest, c);
    if (candidate == 0) continue;
    const float scale = Format::value(candidate);
    squared_errors<true>(magnitudes, 0, coarse, scale, errors);
    squared_errors<false>(magnitudes, coarse, dim, scale, errors);
    std::fill(errors + dim, errors + width, 0.0f);
    const float error = halving_sum(errors, width);
    if (best != 0 && !(error < least)) continue;
    best = candidate;
    least = error;
  }
  return best;
}

// Writes the nibbles and lowest bits of E2M2 codes (E2M1 if kCoarse: the lowest bits are 0) of values [first,
// end), one per byte, for a scale that is not 0.
template <bool kCoarse>
inline void encode(const float* row, const float* magnitudes, int first, int end, float scale,
                   uint8_t* nibbles, uint8_t* lowest) {
  for (int i = first; i < end; ++i) {
    const float value = nearest<kCoarse>(magnitudes[i], scale);
    const int index = int(value < 2 ? value * 4 : value < 4 ? value * 2 + 4 : value + 8);
    nibbles[i] = uint8_t(index >> 1 | (std::signbit(row[i]) ? 8 : 0));
    lowest[i] = uint8_t(index & 1);
  }
}

template <class Format>
inline bool store_fp(const float* row, int dim, uint8_t* codes, uint8_t* scales) {
  alignas(64) float magnitudes[kMaxDim];
  alignas(64) uint8_t nibbles[kMaxDim], lowest[kMaxDim];
  const Extent extent = load_magnitudes(row, dim, magnitudes);
  if (!extent.finite) return false;
  const int coarse = Format::kPlanes ? kFp5Coarse : dim;
  const auto best = best_scale<Format>(magnitudes, dim, coarse, extent.largest);
  std::memset(scales, 0, Format::kPlanes ? size_t(dim) / 8 : sizeof best);
  std::memcpy(scales, &best, sizeof best);
  if (best == 0) {
    std::memset(codes, 0, size_t(dim) / 2);
    return true;
  }
  encode<true>(row, magnitudes, 0, coarse, Format::value(best), nibbles, lowest);
  encode<false>(row, magnitudes, coarse, dim, Format::value(best), nibbles, lowest);
  pack_codes(nibbles, dim, 4, codes);
  for (int i = kFp5Coarse; Format::kPlanes && i < dim; ++i) scales[i / 8] |= uint8_t(lowest[i] << i % 8);
  return true;
}

// ---- mxfp4 and nvfp4 ----

inline uint8_t to_e8m0(float absmax) {
  return uint8_t(std::clamp(int((as_bits(absmax) + 0x3fffff) >> 23) - 2, 0, 252));
}

inline uint8_t to_e4m3(float absmax) {
  const float quotient = absmax / 6.0f;
  const uint32_t bits = as_bits(quotient);
  if (quotient < 0x1p-6f) return uint8_t(std::nearbyintf(quotient * 512.0f));
  return uint8_t(std::min(int((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - 960, 126));
}

inline bool store_microscaled(const float* row, int dim, bool mx, uint8_t* codes, uint8_t* scales) {
  alignas(64) float magnitudes[kMxGroup];
  alignas(64) uint8_t nibbles[kMxGroup], lowest[kMxGroup];
  bool storable = true;
  const int group = mx ? kMxGroup : kNvGroup;
  for (int at = 0; at < dim; at += group, codes += group / 2, ++scales) {
    const Extent extent = load_magnitudes(row + at, group, magnitudes);
    storable &= extent.finite;
    *scales = mx ? to_e8m0(extent.largest) : to_e4m3(extent.largest);
    const float scale = mx ? e8m0(*scales) : e4m3(*scales);
    if (scale == 0) std::memset(nibbles, 0, size_t(group));
    else encode<true>(row + at, magnitudes, 0, group, scale, nibbles, lowest);
    pack_codes(nibbles, group, 4, codes);
  }
  return storable;
}

// ---- int8 and int4 ----

inline bool store_integers(const float* row, int dim, int bits, uint8_t* codes, uint8_t* scale) {
  alignas(64) float magnitudes[kMaxDim];
  const Extent extent = load_magnitudes(row, dim, magnitudes);
  if (!extent.finite) return false;
  const float highest = bits == 8 ? 127.0f : 7.0f, lowest = bits == 8 ? -127.0f : -8.0f;
  const uint16_t half = float_to_f16(std::min(extent.largest * (1 / highest), kMaxHalf));
  store_half(scale, half);
  if (half == 0) {
    std::memset(codes, 0, size_t(dim) * bits / 8);
    return true;
  }
  const float step = f16_to_float(half);
  alignas(64) uint8_t values[kMaxDim];
  for (int i = 0; i < dim; ++i)
    values[i] = uint8_t(int8_t(std::min(std::max(std::nearbyintf(row[i] / step), lowest), highest)));
  pack_codes(values, dim, bits, codes);
  return true;
}

// ---- affine8 and affine4 ----

// Step and bias of a group of affine codes from 0 to `most`, before rounding to fp16.
struct AffineGroup {
  float step, bias;

  AffineGroup(float low, float high, float most) {
    const float size = std::max((high - low) / most, 1e-7f);
    const bool from_low = std::fabs(low) > std::fabs(high);
    const float edge = from_low ? low : high;
    step = from_low ? size : -size;
    const float count = std::nearbyintf(edge / step);
    bias = count != 0 ? edge : 0.0f;
    if (count != 0) step = edge / count;
  }

  // Stores both as fp16; returns false if they do not fit.
  bool store(uint8_t* to) const {
    const uint16_t stored_step = float_to_f16(step), stored_bias = float_to_f16(bias);
    store_half(to, stored_step);
    store_half(to + 2, stored_bias);
    return (stored_step & 0x7c00) != 0x7c00 && (stored_bias & 0x7c00) != 0x7c00;
  }
};

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
  pack_codes(values, kAffineGroup, bits, codes);
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
    const auto store_in_registers = [&]<class Format>(Format) {
      return (dim == 64    ? store_fp_of<Format, 4>
              : dim == 128 ? store_fp_of<Format, 8>
                           : store_fp_of<Format, 16>)(row, codes, scales);
    };
    if (format.codes == CodeType::fp4) return store_in_registers(Fp4Row{});
    if (format.codes == CodeType::fp5) return store_in_registers(Fp5Row{});
  }
#endif
  switch (format.codes) {
    case CodeType::bf16: return store_16_bits(Float::bf16, 0x1.fefffep127f, row, dim, codes);
    case CodeType::fp16: return store_16_bits(Float::f16, 0x1.ffdffep15f, row, dim, codes);
    case CodeType::int8: return store_integers(row, dim, 8, codes, scales);
    case CodeType::int4: return store_integers(row, dim, 4, codes, scales);
    case CodeType::fp4: return store_fp<Fp4Row>(row, dim, codes, scales);
    case CodeType::fp5: return store_fp<Fp5Row>(row, dim, codes, scales);
    case CodeType::mxfp4: return store_microscaled(row, dim, true, codes, scales);
    case CodeType::nvfp4: return store_microscaled(row, dim, false, codes, scales);
    case CodeType::affine8: return store_affine(row, dim, 8, codes, scales);
    case CodeType::affine4: return store_affine(row, dim, 4, codes, scales);
  }
  return false;
}

}  // namespace
}  // namespace octavo
