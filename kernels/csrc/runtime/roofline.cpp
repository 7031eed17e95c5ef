#include "runtime/roofline.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "runtime/dispatch.h"
#include "runtime/threads.h"

namespace octavo {
namespace {

double flops_per_s(float (*multiply)(int), double flops_per_round) {
  constexpr int kRounds = 400'000, kRepeats = 3;
  std::vector<float> results(num_threads());
  double best = 1e30;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    parallel_for(num_threads(), [&](int i) { results[i] = multiply(kRounds); });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::min(best, seconds.count());
  }
  return flops_per_round * kRounds * num_threads() / best;
}

}  // namespace

std::pair<double, double> measure_flops() {
#if defined(__x86_64__)
  if (isa() >= Isa::avx512)
    return {flops_per_s(avx512::multiply, avx512::flops_per_round),
            isa() == Isa::amx ? flops_per_s(amx::multiply_bf16, amx::bf16_flops_per_round)
                              : flops_per_s(avx512::multiply_bf16, avx512::bf16_flops_per_round)};
  if (isa() == Isa::avx2) return {flops_per_s(avx2::multiply, avx2::flops_per_round), 0};
#endif
  return {flops_per_s(generic::multiply, generic::flops_per_round), 0};
}

}  // namespace octavo
