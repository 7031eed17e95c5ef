// Decoding of stored codes and scales, as octavo.kernels.formats defines it. Portable code with internal
// linkage, which each instruction set compiles for itself. All products are exact in float32, and only the
// sum of affine formats rounds, so fused multiply-adds change nothing.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/attention.h"
#include "runtime/numeric.h"

namespace octavo {
namespace {

inline constexpr int kMxGroup = 32, kNvGroup = 16, kAffineGroup = 64;  // values that share a scale
inline constexpr int kFp5Coarse = 8;  // values at the start of an fp5 row that have no fifth bit

// Values of E2M2 codes: four bits, and a fifth and lowest bit that is stored separately.
inline constexpr float kE2M2[32] = {0.0f,  0.25f,  0.5f,  0.75f,  1.0f,  1.25f,  1.5f,  1.75f,
                                    2.0f,  2.5f,   3.0f,  3.5f,   4.0f,  5.0f,   6.0f,  7.0f,
                                    -0.0f, -0.25f, -0.5f, -0.75f, -1.0f, -1.25f, -1.5f, -1.75f,
                                    -2.0f, -2.5f,  -3.0f, -3.5f,  -4.0f, -5.0f,  -6.0f, -7.0f};

inline float load_half(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return f16_to_float(bits);
}

// Values of E8M0 and E4M3 scales. NaN codes (255; for E4M3 also 127) are never stored.
inline float e8m0(uint8_t byte) { return as_float(byte == 0 ? 1u << 22 : uint32_t(byte) << 23); }
inline float e4m3(uint8_t byte) {
  return byte < 8 ? float(byte) * 0x1p-9f : as_float((uint32_t(byte) + (120 << 3)) << 20);
}
// Value of an E5M3 scale: fp16 without sign and seven lowest bits; 248 to 255 are never stored.
inline float e5m3(uint8_t byte) { return f16_to_float(uint16_t(byte << 7)); }

inline void expand_bf16(const uint8_t* codes, int dim, float* row) {
  for (int i = 0; i < dim; ++i) {
    uint16_t bits;
    std::memcpy(&bits, codes + 2 * i, 2);
    row[i] = bf16_to_float(bits);
  }
}

inline void expand_fp16(const uint8_t* codes, int dim, float* row) {
  for (int i = 0; i < dim; ++i) row[i] = load_half(codes + 2 * i);
}

inline void expand_int8(const uint8_t* codes, int dim, float scale, float* row) {
  for (int i = 0; i < dim; ++i) row[i] = float(int8_t(codes[i])) * scale;
}

inline void expand_int4(const uint8_t* codes, int dim, float scale, float* row) {
  for (int i = 0; i < dim / 2; ++i) {
    row[2 * i] = float(((codes[i] & 15) ^ 8) - 8) * scale;
    row[2 * i + 1] = float(((codes[i] >> 4) ^ 8) - 8) * scale;
  }
}

// Maps each byte of codes to its two values. With kBits = 1, codes have a lowest bit that is stored
// separately.
template <int kBits>
struct PairsOfValues {
  alignas(64) float of[256 << 2 * kBits][2];
  constexpr PairsOfValues() : of() {
    for (int i = 0; i < 256 << 2 * kBits; ++i)
      for (int k = 0; k < 2; ++k) {
        const int code = i >> (2 * kBits + 4 * k) & 15;
        of[i][k] = kBits == 0 ? kE2M1[code] : kE2M2[code << 1 | (i >> k & 1)];
      }
  }
};
template <int kBits>
inline constexpr PairsOfValues<kBits> kPairsOfValues;

inline void store_pairs(const float* first, const float* second, float scale, float* to) {
  typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
  *reinterpret_cast<Four*>(to) = Four{first[0], first[1], second[0], second[1]} * scale;
}

// Decodes E2M1 codes; `dim` is a multiple of 4.
inline void expand_e2m1(const uint8_t* codes, int dim, float scale, float* row) {
  const auto& pairs = kPairsOfValues<0>.of;
  for (int i = 0; i < dim; i += 4, codes += 2) store_pairs(pairs[codes[0]], pairs[codes[1]], scale, row + i);
}

// Decodes fp5 codes. `planes` has a byte of lowest bits for each eight values, but its first byte is the
// row's scale.
inline void expand_fp5(const uint8_t* codes, const uint8_t* planes, int dim, float* row) {
  const float scale = e5m3(planes[0]);
  expand_e2m1(codes, kFp5Coarse, scale, row);
  const auto& pairs = kPairsOfValues<1>.of;
  for (int i = kFp5Coarse; i < dim; i += 8) {
    const uint8_t* const four = codes + i / 2;
    const int bits = planes[i / 8];
    store_pairs(pairs[four[0] << 2 | (bits & 3)], pairs[four[1] << 2 | (bits >> 2 & 3)], scale, row + i);
    store_pairs(pairs[four[2] << 2 | (bits >> 4 & 3)], pairs[four[3] << 2 | bits >> 6], scale, row + i + 4);
  }
}

inline void expand_affine8(const uint8_t* codes, int dim, float scale, float bias, float* row) {
  for (int i = 0; i < dim; ++i) row[i] = float(codes[i]) * scale + bias;
}

inline void expand_affine4(const uint8_t* codes, int dim, float scale, float bias, float* row) {
  for (int i = 0; i < dim / 2; ++i) {
    row[2 * i] = float(codes[i] & 15) * scale + bias;
    row[2 * i + 1] = float(codes[i] >> 4) * scale + bias;
  }
}

// Calls body(group index, codes, values) for each group of a row; a group has `group_bytes` bytes of codes.
template <class Body>
inline void for_groups(int dim, int group, int group_bytes, const uint8_t* codes, float* row, Body&& body) {
  for (int g = 0; g < dim / group; ++g) body(g, codes + g * group_bytes, row + g * group);
}

// Decodes one stored row to `row`, without undoing the rotation of formats that rotate.
inline void dequantize_row(const RowFormat& format, const uint8_t* codes, const uint8_t* scales, float* row) {
  const int dim = format.dim;
  switch (format.codes) {
    case CodeType::bf16: return expand_bf16(codes, dim, row);
    case CodeType::fp16: return expand_fp16(codes, dim, row);
    case CodeType::int8: return expand_int8(codes, dim, load_half(scales), row);
    case CodeType::int4: return expand_int4(codes, dim, load_half(scales), row);
    case CodeType::fp4: return expand_e2m1(codes, dim, load_half(scales), row);
    case CodeType::fp5: return expand_fp5(codes, scales, dim, row);
    case CodeType::mxfp4:
      return for_groups(dim, kMxGroup, kMxGroup / 2, codes, row, [&](int g, const uint8_t* from, float* to) {
        expand_e2m1(from, kMxGroup, e8m0(scales[g]), to);
      });
    case CodeType::nvfp4:
      return for_groups(dim, kNvGroup, kNvGroup / 2, codes, row, [&](int g, const uint8_t* from, float* to) {
        expand_e2m1(from, kNvGroup, e4m3(scales[g]), to);
      });
    case CodeType::affine8:
      return for_groups(
          dim, kAffineGroup, kAffineGroup, codes, row, [&](int g, const uint8_t* from, float* to) {
            expand_affine8(from, kAffineGroup, load_half(scales + 4 * g), load_half(scales + 4 * g + 2), to);
          });
    case CodeType::affine4:
      return for_groups(
          dim, kAffineGroup, kAffineGroup / 2, codes, row, [&](int g, const uint8_t* from, float* to) {
            expand_affine4(from, kAffineGroup, load_half(scales + 4 * g), load_half(scales + 4 * g + 2), to);
          });
  }
}

}  // namespace
}  // namespace octavo
