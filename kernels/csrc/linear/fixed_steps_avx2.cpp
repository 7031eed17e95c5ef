// Choice of fixed-point steps for bf16 weights on AVX2 (linear/fixed_avx2.cpp), when weights are packed.
#include <algorithm>

#include "linear/fixed_weights_avx2.h"
#include "linear/kernels.h"

namespace octavo::avx2 {
namespace {

// Sum and maximum of the weights' magnitudes over `pairs` pairs of inputs, for each output of a panel.
struct Magnitudes {
  alignas(32) float sum[kPanel], largest[kPanel];
};

void measure_group(const uint8_t* words, int pairs, Magnitudes& out) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), upper = _mm256_set1_epi32(0x7fff0000);
  for (int column = 0; column < kPanel; column += 8) {
    __m256 sum = _mm256_setzero_ps(), largest = _mm256_setzero_ps();
    for (int pair = 0; pair < pairs; ++pair) {
      const __m256i two = load_words(words + pair * kPairBytes + 4 * column);
      const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(two, upper));
      const __m256 even = _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(two, 16), magnitude));
      sum = _mm256_add_ps(sum, _mm256_add_ps(odd, even));
      largest = _mm256_max_ps(largest, _mm256_max_ps(odd, even));
    }
    _mm256_store_ps(out.sum + column, sum);
    _mm256_store_ps(out.largest + column, largest);
  }
}

}  // namespace

bool choose_fixed_steps(const PackedShape& shape, const uint8_t* panel, uint8_t* exponents) {
  const int inputs = shape.padded_inputs();
  for (int k = 0; k < inputs; k += kFixedGroup, exponents += kPanel) {
    Magnitudes group;
    measure_group(panel + k / 2 * kPairBytes, std::min(inputs - k, kFixedGroup) / 2, group);
    for (int n = 0; n < kPanel; ++n) {
      if (!(group.sum[n] < 0x1p110f)) return false;
      // Limits the sum of codes to less than 2^17, although each of 128 codes is rounded by up to a half and
      // the sum of magnitudes by a little.
      const float most = std::min(130944.0f / group.sum[n], 32767.0f / group.largest[n]);
      const int factor = std::min<int>(as_bits(most) >> 23, 253);  // float32 exponent; zeros give inf
      exponents[n] = static_cast<uint8_t>(254 - factor);
    }
  }
  return true;
}

}  // namespace octavo::avx2
