// The exponential in plain arithmetic, with identical operations on every instruction set.
#pragma once

#include "runtime/numeric.h"

namespace octavo {
namespace {

// Cephes' expf: 2^n times a polynomial of degree 5 on [-ln2 / 2, ln2 / 2].
namespace cephes {
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2High = 0.693359375f, kLn2Rest = 2.12194440e-4f;  // their difference is ln 2
constexpr float kTerms[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                            4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
}  // namespace cephes

// Returns 2^n, where `shifted` is n + 1.5 * 2^23.
template <class Bits, class Real>
inline Real power_of_two(Real shifted) {
  Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000;
  Real power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// Returns the exponential of x in [-87, 88] with a relative error below 2e-7; callers clamp x to this range.
// libm's function would prevent vectorization of loops. `Real` is float or a vector of floats, `Bits` the
// integer type of its size.
template <class Real, class Bits>
inline __attribute__((always_inline)) Real exp_within(Real x) {
  const Real shifted = x * cephes::kLog2E + cephes::kRound;
  const Real n = shifted - cephes::kRound;
  const Real r = (x - n * cephes::kLn2High) + n * cephes::kLn2Rest;
  Real p = Real{} + cephes::kTerms[0];
  p = p * r + cephes::kTerms[1];
  p = p * r + cephes::kTerms[2];
  p = p * r + cephes::kTerms[3];
  p = p * r + cephes::kTerms[4];
  p = p * r + cephes::kTerms[5];
  p = p * (r * r) + r + 1.0f;
  return p * power_of_two<Bits>(shifted);
}

template <class Real, class Bits>
inline Real exp_of(Real x) {
  const Real low = Real{} - 87.0f, high = Real{} + 88.0f;
  return exp_within<Real, Bits>(x > high ? high : (x < low ? low : x));
}

inline float exp_float(float x) { return exp_of<float, uint32_t>(x); }

}  // namespace
}  // namespace octavo
