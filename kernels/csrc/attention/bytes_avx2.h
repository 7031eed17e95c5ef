// Codes as bytes, 32 to a vector, for products of bytes (VPMADDUBSW).
#pragma once

#include <cstring>

#include "attention/codes_avx2.h"
#include "pages/codes.h"

namespace octavo::OCTAVO_ISA {
namespace {

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
