#include "linear/channel.h"

#include <cmath>

namespace octavo {
namespace {

constexpr int kMiddle = 128;  // offset that makes a channel's integers unsigned; see PackedWeight::factors
constexpr int kLargestFactor = 16;

// Finds k and 128 - k z for a group, so that a code q stands for k (q - z) units; returns false if none fit.
bool find_factors(int bits, float scale, float bias, float unit, uint8_t (&out)[2]) {
  const int most = (1 << bits) - 1;
  if (unit == 0) {  // all weights of the channel are zero for any codes
    out[0] = out[1] = 0;
    return scale == 0 && bias == 0;
  }
  const float factor = std::nearbyint(scale / unit), zero = std::nearbyint(-bias / scale);
  const float largest = bits == 8 ? 1 : kLargestFactor;
  if (!(factor >= 1 && factor <= largest && zero >= 0 && zero <= static_cast<float>(most))) return false;
  if (factor * unit != scale || -zero * scale != bias) return false;
  if (factor * zero > kMiddle || factor * (static_cast<float>(most) - zero) >= kMiddle) return false;
  out[0] = static_cast<uint8_t>(factor), out[1] = static_cast<uint8_t>(kMiddle - factor * zero);
  return true;
}

}  // namespace

float find_channel(int bits, const float* scales, const float* biases, int groups, uint8_t* factors) {
  float least = INFINITY;
  for (int g = 0; g < groups; ++g) least = scales[g] > 0 && scales[g] < least ? scales[g] : least;
  for (int divisor = 1; divisor <= (bits == 8 ? 1 : kLargestFactor); ++divisor) {
    const float unit = std::isinf(least) ? 0 : least / static_cast<float>(divisor);
    int g = 0;
    for (uint8_t found[2]; g < groups && find_factors(bits, scales[g], biases[g], unit, found); ++g)
      factors[2 * g] = found[0], factors[2 * g + 1] = found[1];
    if (g == groups) return unit;
  }
  return NAN;
}

}  // namespace octavo
