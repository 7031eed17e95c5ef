// Scales of codes, and codes as bytes, 32 to a vector, for products of bytes (VPMADDUBSW).
#pragma once

#include <immintrin.h>

#include <cstring>

#include "attention/code_values.h"
#include "attention/rows.h"
#include "pages/codes.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kChunk = 64;  // dims that are converted together: 32 bytes of codes

OCTAVO_INLINE __m256i load256(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
OCTAVO_INLINE void store256(void* to, __m256i value) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), value);
}

// Loads 16 halves as floats; 0 where the mask has a 0.
OCTAVO_INLINE void load_halves(const uint8_t* from, uint32_t mask, float (&to)[16]) {
  for (int i = 0; i < 16; i += 8)
    _mm256_storeu_ps(to + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i))));
  if (mask == 0xffff) return;
  for (int i = 0; i < 16; ++i) to[i] = mask >> i & 1 ? to[i] : 0.0f;
}

// Loads the scales of 16 rows; 0 where the mask has a 0. A row of planes begins with its scale, an E5M3 byte.
template <class Code>
OCTAVO_INLINE void load_scales(const uint8_t* from, int64_t stride, uint32_t mask, float (&to)[16]) {
  if constexpr (!Code::kPlanes) return load_halves(from, mask, to);
  uint16_t halves[16];
  for (int i = 0; i < 16; ++i) halves[i] = uint16_t(from[i * stride] << 7);
  load_halves(reinterpret_cast<const uint8_t*>(halves), mask, to);
}

// Table for VPSHUFB: kOf(code) for each of 16 codes, in both 128-bit halves; made at compile time.
template <auto kOf>
OCTAVO_INLINE __m256i byte_table() {
  struct Bytes {
    alignas(16) int8_t all[16];
    constexpr Bytes() : all() {
      for (int code = 0; code < 16; ++code) all[code] = int8_t(kOf(code));
    }
  };
  static constexpr Bytes kBytes;
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kBytes.all)));
}

// Whether rows are multiplied as integers.
inline bool takes_integers(const AttendArgs& args, const RowFormat& format) {
  return format.dim % kChunk == 0 && by_bytes(args);
}

template <class Code>
constexpr bool kWords = Code::kBits == 8;

constexpr int kLargestByte = 127, kLargestWord = 32767;  // largest fixed-point values

// Returns the largest magnitude of a row; NaNs are ignored.
inline float largest_of(const float* row, int dim) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 top = _mm256_setzero_ps();
  for (int d = 0; d < dim; d += 8) top = _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(row + d)), top);
  return octavo::largest_lane((Vec)top);
}

// Scales `dim` elements to integers in [-limit, limit]; returns the largest magnitude, which became `limit`.
inline float fix_elements(const float* row, int dim, int limit, int32_t* fixed) {
  const float largest = largest_of(row, dim);
  const __m256 to_fixed = _mm256_set1_ps(largest > 1e-30f ? float(limit) / largest : 0.0f);
  for (int d = 0; d < dim; d += 8)
    store256(fixed + d, _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(row + d), to_fixed)));
  return largest;
}

// Keeps the value in a register until this point: the compiler can neither delay its computation nor reload
// it from memory.
OCTAVO_INLINE void hold(__m256i& value) { asm volatile("" : "+x"(value)); }

// Adds products of neighbouring bytes to `sum`, in program order. Compilers may otherwise add in a tree,
// which keeps too many products in registers at once.
OCTAVO_INLINE void add_products(__m256i& sum, __m256i bytes, __m256i signed_bytes) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(bytes, signed_bytes));
  hold(sum);
}

// Makes the compiler assume that this memory has changed, so that it reloads values.
template <class T>
OCTAVO_INLINE void forget(const T*& pointer) {
  asm volatile("" : "+r"(pointer));
}

// Spreads a row's lowest bits of dims [dim, dim + 64): bits 2 (i % 4) and 2 (i % 4) + 1 of byte i are the
// lowest bits of dims 2 i and 2 i + 1.
template <class Code>
OCTAVO_INLINE __m256i plane_bytes(const uint8_t* planes, int dim) {
  if constexpr (!Code::kPlanes) return _mm256_setzero_si256();
  uint64_t bits;
  std::memcpy(&bits, planes + dim / 8, 8);
  static_assert(kFp5Coarse == 8);
  if (dim == 0) bits &= ~uint64_t(0xff);  // byte 0 is the scale, not bits
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5,
                                          5, 6, 6, 6, 6, 7, 7, 7, 7);
  return _mm256_shuffle_epi8(_mm256_set1_epi64x(int64_t(bits)), spread);
}

// Looks up value + kShift of each nibble, with low and high nibbles in separate vectors. In `codes`, kEach
// neighbouring bytes are the same dims of kEach rows, so the plane's bits advance once per kEach bytes.
template <class Code, int kShift, int kEach>
struct ByteLookup {
  __m256i table = byte_table<[](int code) { return Code::value(code) + kShift; }>();
  __m256i addends = byte_table<[](int code) { return Code::added(code); }>();

  __attribute__((always_inline)) void expand(__m256i codes, __m256i planes, __m256i& low,
                                             __m256i& high) const {
    const __m256i nibble = _mm256_set1_epi8(15);
    low = look_up<0>(_mm256_and_si256(codes, nibble), planes);
    high = look_up<1>(_mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble), planes);
  }

 private:
  template <int kHigh>
  __attribute__((always_inline)) __m256i look_up(__m256i codes, __m256i planes) const {
    const __m256i values = _mm256_shuffle_epi8(table, codes);
    if constexpr (!Code::kPlanes) return values;
    constexpr uint64_t kBits = kEach == 1 ? 0x4010040140100401 : 0x4040101004040101;
    const __m256i bit = _mm256_and_si256(planes, _mm256_set1_epi64x(int64_t(kBits << kHigh)));
    // Bytes of -1 where the bit is not set: as lookup indices they give 0.
    const __m256i unset = _mm256_cmpeq_epi8(bit, _mm256_setzero_si256());
    return _mm256_add_epi8(values, _mm256_shuffle_epi8(addends, _mm256_or_si256(codes, unset)));
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
