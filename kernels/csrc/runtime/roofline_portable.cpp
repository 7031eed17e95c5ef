#include "runtime/roofline.h"
#include "runtime/vectors.h"

namespace octavo::OCTAVO_ISA {

constexpr int kChains = 10;  // independent sums, enough to hide the latency of multiply-adds
extern const double flops_per_round = 2.0 * kLanes * kChains;

float multiply(int rounds) {
  const Vec factor = Vec{} + 0.999f, term = Vec{} + 0.1f;
  Vec sums[kChains];
  for (int c = 0; c < kChains; ++c) sums[c] = term * static_cast<float>(c);
  for (int round = 0; round < rounds; ++round)
    for (int c = 0; c < kChains; ++c) sums[c] = sums[c] * factor + term;
  float total = 0;
  for (int c = 0; c < kChains; ++c) total += sums[c][0];
  return total;
}

#if defined(__AVX512BF16__)
extern const double bf16_flops_per_round = 2.0 * 2 * kLanes * kChains;

float multiply_bf16(int rounds) {
  const __m512bh factor = reinterpret_cast<__m512bh>(_mm512_set1_ps(0.5f));
  __m512 sums[kChains];
  for (int c = 0; c < kChains; ++c) sums[c] = _mm512_set1_ps(static_cast<float>(c));
  for (int round = 0; round < rounds; ++round)
#pragma GCC unroll 10
    for (int c = 0; c < kChains; ++c) sums[c] = _mm512_dpbf16_ps(sums[c], factor, factor);
  float total = 0;
  for (int c = 0; c < kChains; ++c) total += _mm512_cvtss_f32(sums[c]);
  return total;
}
#endif

}  // namespace octavo::OCTAVO_ISA
