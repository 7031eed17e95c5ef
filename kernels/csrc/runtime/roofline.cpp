#include "runtime/roofline.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "linear/packed.h"
#include "runtime/dispatch.h"
#include "runtime/threads.h"

namespace octavo {
namespace {

constexpr int kPieces = 64;  // pieces of the buffer, which threads read in parallel
constexpr int kRounds = 400'000;
constexpr int kRepeats = 3;

struct Level {
  uint32_t (*sum_bytes)(const uint8_t*, std::size_t);
  float (*multiply)(int);
  double flops;
  float (*multiply_bf16)(int);
  double bf16_flops;
};

Level level() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::amx:
      return {avx512::sum_bytes, avx512::multiply, avx512::flops_per_round, amx::multiply_bf16,
              amx::bf16_flops_per_round};
    case Isa::avx512:
      return {avx512::sum_bytes, avx512::multiply, avx512::flops_per_round, avx512::multiply_bf16,
              avx512::bf16_flops_per_round};
    case Isa::avx2: return {avx2::sum_bytes, avx2::multiply, avx2::flops_per_round, nullptr, 0};
    case Isa::generic: break;
  }
#endif
  return {generic::sum_bytes, generic::multiply, generic::flops_per_round, nullptr, 0};
}

// Returns the shortest of several times, in seconds, for body(item) on `items` items.
template <class Body>
double best_seconds(int items, Body&& body) {
  double best = 1e30;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    parallel_for(items, body);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::min(best, seconds.count());
  }
  return best;
}

double flops_per_s(float (*multiply)(int), double flops_per_round) {
  if (multiply == nullptr) return 0;
  const int items = num_threads();
  std::vector<float> results(items);
  const double seconds = best_seconds(items, [&](int i) { results[i] = multiply(kRounds); });
  return flops_per_round * kRounds * items / seconds;
}

}  // namespace

Roofline measure_roofline(std::size_t read_bytes) {
  const Level used = level();
  const Buffer buffer(read_bytes);
  std::vector<uint32_t> sums(kPieces);
  const std::size_t piece = read_bytes / kPieces;
  // The buffer is written first, because unwritten memory is one page of zeros, which is read from a cache.
  parallel_for(kPieces, [&](int i) { std::memset(buffer.data() + piece * i, i + 1, piece); });
  const double seconds =
      best_seconds(kPieces, [&](int i) { sums[i] = used.sum_bytes(buffer.data() + piece * i, piece); });
  return {static_cast<double>(piece * kPieces) / seconds, flops_per_s(used.multiply, used.flops),
          flops_per_s(used.multiply_bf16, used.bf16_flops)};
}

}  // namespace octavo
