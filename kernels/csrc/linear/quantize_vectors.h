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

// Packs kCount codes, one per byte, as a stream of bits: kBits of each code, from the lowest up.
template <int kCount, int kBits>
inline void pack_codes(const uint8_t* codes, uint8_t* to) {
  static_assert(kBits == 8 || kBits == 4 || kBits == 2);
  if constexpr (kBits == 8) {
    std::memcpy(to, codes, kCount);
  } else if constexpr (kBits == 4) {
    uint16_t pairs[kCount / 2];
    std::memcpy(pairs, codes, kCount);
    for (int i = 0; i < kCount / 2; ++i) to[i] = static_cast<uint8_t>(pairs[i] | pairs[i] >> 4);
  } else {
    uint32_t fours[kCount / 4];
    std::memcpy(fours, codes, kCount);
    for (int i = 0; i < kCount / 4; ++i) {
      const uint32_t x = fours[i];
      to[i] = static_cast<uint8_t>(x | x >> 6 | x >> 12 | x >> 18);
    }
  }
}

}  // namespace
}  // namespace octavo
