// Vector operations for quantizing weights. Internal linkage: see numeric.h.
#pragma once

#include <algorithm>
#include <cstring>

#include "runtime/vectors.h"

namespace octavo {
namespace {

constexpr float kRound = 0x1.8p23f;  // x + kRound rounds x to an integer for |x| < 2^22, ties to even

typedef uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1), may_alias));

inline Vec clamp(Vec x, float low, float high) {  // NaN becomes `low`
  x = x > low ? x : Vec{} + low;
  return x < high ? x : Vec{} + high;
}

// Rounds 0 <= x < 256 to integers.
inline UintVec rounded(Vec x) { return (UintVec)(x + kRound) & 0xff; }

inline void store_bytes(uint8_t* to, UintVec x) {
  *reinterpret_cast<Bytes*>(to) = __builtin_convertvector(x, Bytes);
}

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

// Returns the smallest lane (for the largest, negate argument and result). It reads four lanes at a time,
// because a Vec may have several registers.
inline float least_of(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  const auto four = [&](int i) { return *reinterpret_cast<const Four*>(lanes + i); };
  Four least = four(0);
  for (int i = 4; i < kLanes; i += 4) least = four(i) < least ? four(i) : least;
  return std::min(std::min(least[0], least[1]), std::min(least[2], least[3]));
}

// Quantizes `count` values to codes of 8 or 4 bits, which it packs from the lowest bits up. `code` returns
// the codes of a vector of values; those that are no code are clamped, and NaN becomes code 0.
template <int kBits, class Code>
inline void store_codes(const float* values, int count, uint8_t* to, Code&& code) {
  static_assert(kBits == 8 || kBits == 4);
  constexpr int kPart = 32;  // every group size is a multiple of this
  for (int at = 0; at < count; at += kPart, to += kPart * kBits / 8) {
    uint16_t pairs[kPart / 2];
    uint8_t* const codes = kBits == 8 ? to : reinterpret_cast<uint8_t*>(pairs);
    for (int j = 0; j < kPart; j += kLanes)
      store_bytes(codes + j, rounded(clamp(code(load(values + at + j)), 0, (1 << kBits) - 1)));
    for (int i = 0; i < kPart / 2 && kBits == 4; ++i) to[i] = static_cast<uint8_t>(pairs[i] | pairs[i] >> 4);
  }
}

}  // namespace
}  // namespace octavo
