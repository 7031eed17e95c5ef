#include "runtime/numeric.h"
#include "runtime/roofline.h"

namespace octavo::OCTAVO_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kChains = 10;  // independent sums: more than latency times throughput

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4), aligned(4)));

}  // namespace

extern const double flops_per_round = 2.0 * kWidth * kChains;

uint32_t sum_bytes(const uint8_t* data, std::size_t bytes) {
  Words sums[4] = {};
  const std::size_t step = sizeof(sums);
  for (std::size_t at = 0; at + step <= bytes; at += step)
    for (int i = 0; i < 4; ++i) sums[i] += *reinterpret_cast<const Words*>(data + at + i * sizeof(Words));
  uint32_t total = 0;
  for (int i = 0; i < kWidth; ++i) total += sums[0][i] + sums[1][i] + sums[2][i] + sums[3][i];
  return total;
}

float multiply(int rounds) {
  Vec sums[kChains], factor, term;
  for (int i = 0; i < kWidth; ++i) factor[i] = 0.999f, term[i] = 0.1f;
  for (int c = 0; c < kChains; ++c) sums[c] = term * static_cast<float>(c);
  for (int round = 0; round < rounds; ++round)
    for (int c = 0; c < kChains; ++c) sums[c] = sums[c] * factor + term;
  float total = 0;
  for (int c = 0; c < kChains; ++c) total += sums[c][0];
  return total;
}

}  // namespace octavo::OCTAVO_ISA
