#include <immintrin.h>

#include "runtime/roofline.h"

namespace octavo::avx512 {

constexpr int kChains = 12;
extern const double bf16_flops_per_round = 2.0 * 32 * kChains;

float multiply_bf16(int rounds) {
  __m512 sums[kChains];
  const __m512bh factor = reinterpret_cast<__m512bh>(_mm512_set1_ps(0.5f));
  for (int c = 0; c < kChains; ++c) sums[c] = _mm512_set1_ps(static_cast<float>(c));
  for (int round = 0; round < rounds; ++round)
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sums[c] = _mm512_dpbf16_ps(sums[c], factor, factor);
  float total = 0;
  for (int c = 0; c < kChains; ++c) total += _mm512_cvtss_f32(sums[c]);
  return total;
}

}  // namespace octavo::avx512
