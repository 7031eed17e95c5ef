// Drawing from float32 logits. The boundary of top_p is found by two histograms of the weights, by the
// upper and then by the lower half of their bits.
#include <algorithm>
#include <cstring>

#include "attention_math.h"
#include "sampling_walk.h"
#include "threads.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kHalf = 1 << 16;
constexpr int kMaxima = 16;  // kept side by side: a vector of them takes a comparison

// The largest of the row, or NaN if it holds one.
float largest_of(const float* logits, int size) {
  float lanes[kMaxima];
  uint32_t nan[kMaxima] = {};
  for (float& lane : lanes) lane = logits[0];
  int i = 0;
  for (; i + kMaxima <= size; i += kMaxima)
    for (int lane = 0; lane < kMaxima; ++lane) {
      const float x = logits[i + lane];
      lanes[lane] = x > lanes[lane] ? x : lanes[lane];
      nan[lane] |= x != x;
    }
  for (; i < size; ++i) {
    lanes[0] = logits[i] > lanes[0] ? logits[i] : lanes[0];
    nan[0] |= logits[i] != logits[i];
  }
  for (int lane = 0; lane < kMaxima; ++lane) {
    lanes[0] = lanes[lane] > lanes[0] ? lanes[lane] : lanes[0];
    nan[0] |= nan[lane];
  }
  return nan[0] ? __builtin_nanf("") : lanes[0];
}

// The k-th largest, 0 < k < size. The k-th largest of the maxima of blocks bounds it from below, so that
// for a small k nearly all blocks are passed over.
float kth_largest(const float* logits, int size, int k) {
  constexpr int kBlock = 64;
  const int blocks = (size + kBlock - 1) / kBlock;
  float* const maxima = static_cast<float*>(thread_scratch(sizeof(float) * (2 * blocks + size)));
  float* const ordered = maxima + blocks;
  float* const candidates = ordered + blocks;
  const auto larger = [](float a, float b) { return a > b; };
  const auto end_of = [&](int block) { return size < (block + 1) * kBlock ? size : (block + 1) * kBlock; };
  for (int block = 0; block < blocks; ++block)
    maxima[block] = largest_of(logits + block * kBlock, end_of(block) - block * kBlock);
  float bound = -__builtin_inff();
  if (k <= blocks) {
    std::copy_n(maxima, blocks, ordered);
    std::nth_element(ordered, ordered + k - 1, ordered + blocks, larger);
    bound = ordered[k - 1];
  }
  int count = 0;
  for (int block = 0; block < blocks; ++block) {
    if (maxima[block] < bound) continue;
    for (int i = block * kBlock; i < end_of(block); ++i) {
      candidates[count] = logits[i];
      count += logits[i] >= bound;
    }
  }
  std::nth_element(candidates, candidates + k - 1, candidates + count, larger);
  return candidates[k - 1];
}

// Weights [size] of the logits, 0 for those that min_p or a `smallest` logit leaves out.
void weigh(const RowDraw& call, float largest, float smallest, float* weights) {
  const float temperature = call.temperature, min_p = call.min_p;
  for (int at = 0; at < call.size; at += kWalkBlock) {
    const float* const logits = static_cast<const float*>(call.logits) + at;
    const int count = call.size - at < kWalkBlock ? call.size - at : kWalkBlock;
    float values[kWalkBlock] = {};
    for (int i = 0; i < count; ++i) values[i] = (logits[i] - largest) / temperature;
    for (int i = 0; i < count; i += kLanes) store(values + i, exp_of<Vec, IntVec>(load(values + i)));
    for (int i = 0; i < count; ++i)
      weights[at + i] = if_true((logits[i] >= smallest) & (values[i] >= min_p), above_zero(values[i]));
  }
}

double sum_of(const float* weights, int size) {
  return sum_weights(0, size, [weights](int i) { return weights[i]; });
}

// The smallest weight of a nucleus, and how many of those equal to it belong.
struct Boundary {
  float weight;
  int kept;
};

Boundary find_boundary(const float* weights, int size, double target) {
  // Weights lie in [0, 1]: their bits are in their order.
  constexpr int kUpper = (0x3f800000 >> 16) + 1;  // upper halves of the bits of 0 to 1
  double* const masses = static_cast<double*>(thread_scratch(4 * kHalf));
  static_assert(sizeof(double) * kUpper <= 4 * kHalf);
  std::memset(masses, 0, sizeof(double) * kUpper);
  for (int i = 0; i < size; ++i)
    if (weights[i] > 0) masses[as_bits(weights[i]) >> 16] += weights[i];
  double above = 0;
  int upper = -1;
  for (int at = kUpper - 1; at >= 0; --at) {
    if (masses[at] == 0) continue;
    if (upper >= 0) above += masses[upper];
    upper = at;
    if (above + masses[at] >= target) break;
  }
  uint32_t* const counts = reinterpret_cast<uint32_t*>(masses);
  std::memset(counts, 0, 4 * kHalf);
  for (int i = 0; i < size; ++i)
    if (static_cast<int>(as_bits(weights[i]) >> 16) == upper) ++counts[as_bits(weights[i]) & 0xffff];
  Boundary found{0, 0};
  for (int at = kHalf - 1; at >= 0; --at) {
    if (counts[at] == 0) continue;
    if (found.kept > 0) above += static_cast<double>(found.weight) * found.kept;
    found = {as_float(static_cast<uint32_t>(upper) << 16 | static_cast<uint32_t>(at)), static_cast<int>(counts[at])};
    if (above + static_cast<double>(found.weight) * found.kept >= target) break;
  }
  found.kept = needed_ties(above, target, found.weight, found.kept);
  return found;
}

void keep_nucleus(float* weights, int size, double p) {
  const Boundary boundary = find_boundary(weights, size, p * sum_of(weights, size));
  for (int i = 0; i < size; ++i) weights[i] = weights[i] < boundary.weight ? 0 : weights[i];
  for (int i = 0, left = boundary.kept; i < size; ++i)
    if (weights[i] == boundary.weight && --left < 0) weights[i] = 0;
}

}  // namespace

int draw_from_floats(const RowDraw& call) {
  const float* const logits = static_cast<const float*>(call.logits);
  const float largest = largest_of(logits, call.size);
  if (!__builtin_isfinite(largest)) return kNotFinite;
  if (call.temperature == 0) {
    int i = 0;
    while (logits[i] != largest) ++i;
    return i;
  }
  const bool cut = call.top_k > 0 && call.top_k < call.size;
  const float smallest = cut ? kth_largest(logits, call.size, call.top_k) : -__builtin_inff();
  float* const weights = static_cast<float*>(thread_scratch(sizeof(float) * call.size, 1));
  weigh(call, largest, smallest, weights);
  if (call.top_p < 1) keep_nucleus(weights, call.size, call.top_p);
  const auto weight = [weights](int i) { return weights[i]; };
  Walk walk{call.uniform * sum_of(weights, call.size)};
  const int id = walk.pass(0, call.size, weight);
  return id != kNotFinite ? id : last_positive(call.size, weight);
}

}  // namespace octavo::OCTAVO_ISA
