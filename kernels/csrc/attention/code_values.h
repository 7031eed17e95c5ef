// Integers that stand for the values of 4-bit codes (fp4, int4), of 4-bit codes with a bit plane of lowest
// bits (fp5), and of bytes (int8), which are their own.
#pragma once

#include "attention/sides.h"
#include "runtime/numeric.h"

namespace octavo::OCTAVO_ISA {
namespace {

// A value times kScale is an integer up to kLargestValue: value(code), plus added(code) if its bit in the
// plane is set. Where K must be unsigned, kLargestValue is added, and what that adds to a product taken off.
struct Nibble {
  static constexpr int kBits = 4;
  static constexpr int kParts = 1;  // bytes per element of a query, and per weight (AVX-512)
  static constexpr bool kPlanes = false;
  static constexpr int added(int) { return 0; }
};
struct Fp4 : Nibble {
  static constexpr int kScale = 2, kLargestValue = 12;
  static constexpr int value(int code) { return int(kScale * kE2M1[code]); }
};
struct Int4 : Nibble {
  static constexpr int kScale = 1, kLargestValue = 8;
  static constexpr int value(int code) { return (code ^ 8) - 8; }
};
struct Int8 : Nibble {
  static constexpr int kBits = 8, kParts = 2, kScale = 1, kLargestValue = 128;
  static constexpr int value(int code) { return code; }
};
struct Fp5 : Nibble {
  static constexpr int kScale = 4, kLargestValue = 28;
  static constexpr bool kPlanes = true;
  static constexpr int value(int code) { return int(kScale * kE2M1[code]); }
  // Half of the distance to the next E2M1 value, in quarters: 1 for exponents 0 and 1, then 2 and 4.
  static constexpr int added(int code) {
    const int exponent = code >> 1 & 3, half = exponent < 2 ? 1 : 1 << (exponent - 1);
    return code & 8 ? -half : half;
  }
};

// Returns the side that make() has for these codes, or null if they are not multiplied as integers.
template <class Make>
auto integer_side(CodeType codes, Make make) -> decltype(make(Fp4{})) {
  switch (codes) {
    case CodeType::fp4: return make(Fp4{});
    case CodeType::fp5: return make(Fp5{});
    case CodeType::int4: return make(Int4{});
    case CodeType::int8: return make(Int8{});
    default: return nullptr;
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
