#include "runtime/roofline.h"
#include "runtime/vectors.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kChains = 10;  // independent sums, enough to hide the latency of multiply-adds

}  // namespace

extern const double flops_per_round = 2.0 * kLanes * kChains;

uint32_t sum_bytes(const uint8_t* data, std::size_t bytes) {
  UintVec sums[4] = {};
  const std::size_t step = sizeof(sums);
  for (std::size_t at = 0; at + step <= bytes; at += step)
    for (int i = 0; i < 4; ++i) sums[i] += *reinterpret_cast<const UintVec*>(data + at + i * sizeof(UintVec));
  uint32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += sums[0][i] + sums[1][i] + sums[2][i] + sums[3][i];
  return total;
}

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

}  // namespace octavo::OCTAVO_ISA
