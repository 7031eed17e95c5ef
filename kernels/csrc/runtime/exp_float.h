// The exponential in plain arithmetic, the same on every instruction set.
#pragma once

#include "runtime/numeric.h"

namespace octavo {
namespace {

// 2^n, where `shifted` is n + 1.5 * 2^23.
template <class Bits, class Real>
inline Real power_of_two(Real shifted) {
  Bits bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000;
  Real power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// Cephes' expf: 2^n times a degree-5 polynomial on [-ln2 / 2, ln2 / 2], relative error below 2e-7;
// beyond [-87, 88] that of the nearer end. Written out because a call to libm would keep loops scalar.
// `Real` is float or a vector of floats, `Bits` the integers of its size. This is the middle of it, for x in
// [-87, 88].
template <class Real, class Bits>
inline __attribute__((always_inline)) Real exp_within(Real x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Real shifted = x * 1.44269504088896341f + magic;
  const Real n = shifted - magic;
  const Real r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Real p = Real{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
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
