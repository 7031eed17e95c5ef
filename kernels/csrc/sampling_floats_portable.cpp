// Drawing from float32 logits: a weight for each, and sums of blocks of them. The boundary of top_p is found
// by two histograms of the weights, by the upper and then by the lower half of their bits.
#include <algorithm>
#include <cstring>

#include "attention_math.h"
#include "sampling_walk.h"
#include "threads.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kHalf = 1 << 16;

typedef double DoubleVec __attribute__((vector_size(8 * kLanes)));

double sum_lanes(DoubleVec sums) {
  double sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  return sum;
}

// The sum of those of a block of values that are at least `smallest`, a bound above 0.
double sum_from(const float* values, float smallest) {
  DoubleVec sums = {};
  const Vec bound = Vec{} + smallest;
  for (int i = 0; i < kWalkBlock; i += kLanes) {
    const Vec value = load(values + i);
    sums += __builtin_convertvector((Vec)((IntVec)value & (value >= bound)), DoubleVec);
  }
  return sum_lanes(sums);
}

// The largest of the row, or NaN if it holds one.
float largest_of(const float* logits, int size) {
  constexpr int kSideBySide = 4;
  Vec largest[kSideBySide];
  IntVec nan = {};
  for (Vec& vector : largest) vector = Vec{} + logits[0];
  int i = 0;
  for (; i + kSideBySide * kLanes <= size; i += kSideBySide * kLanes)
    for (int j = 0; j < kSideBySide; ++j) {
      const Vec x = load(logits + i + j * kLanes);
      largest[j] = x > largest[j] ? x : largest[j];
      nan |= x != x;
    }
  float found = logits[0];
  bool any = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    any |= nan[lane] != 0;
    for (const Vec& vector : largest) found = vector[lane] > found ? vector[lane] : found;
  }
  for (; i < size; ++i) {
    found = logits[i] > found ? logits[i] : found;
    any |= logits[i] != logits[i];
  }
  return any || found != found ? __builtin_nanf("") : found;
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

// Weights of the logits, 0 for those that min_p or a `smallest` logit leaves out and up to the end of the last
// block, and the sums of blocks of them.
void weigh(const RowDraw& call, float largest, float smallest, float* weights, double* sums) {
  const Vec most = Vec{} + largest, temperature = Vec{} + call.temperature, least = Vec{} + smallest;
  const Vec min_p = Vec{} + (call.min_p > 0x1.8p-126f ? call.min_p : 0x1.8p-126f);  // see above_zero
  for (int at = 0; at < call.size; at += kWalkBlock) {
    const float* logits = static_cast<const float*>(call.logits) + at;
    float last[kWalkBlock];
    if (call.size - at < kWalkBlock) {
      std::fill(std::copy_n(logits, call.size - at, last), last + kWalkBlock, -__builtin_inff());
      logits = last;
    }
    DoubleVec sum = {};
    for (int i = 0; i < kWalkBlock; i += kLanes) {
      const Vec logit = load(logits + i);
      const Vec power = exp_of<Vec, IntVec>((logit - most) / temperature);
      const Vec weight = (Vec)((IntVec)power & (logit >= least) & (power >= min_p));
      store(weights + at + i, weight);
      sum += __builtin_convertvector(weight, DoubleVec);
    }
    sums[at / kWalkBlock] = sum_lanes(sum);
  }
}

// The smallest weight of a nucleus, how many of those equal to it belong, and how many there are.
struct Boundary {
  float weight;
  int kept, ties;
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
  Boundary found{0, 0, 0};
  for (int at = kHalf - 1; at >= 0; --at) {
    if (counts[at] == 0) continue;
    if (found.kept > 0) above += static_cast<double>(found.weight) * found.kept;
    found = {as_float(static_cast<uint32_t>(upper) << 16 | static_cast<uint32_t>(at)), static_cast<int>(counts[at]), 0};
    if (above + static_cast<double>(found.weight) * found.kept >= target) break;
  }
  found.ties = found.kept;
  found.kept = needed_ties(above, target, found.weight, found.ties);
  return found;
}

// Those weights [0, size) that are at least `smallest`, in order of id.
struct Kept {
  const float* weights;
  const double* sums;  // of blocks of all weights
  int size;
  float smallest;  // 0: all

  float operator()(int i) const { return weights[i] >= smallest ? weights[i] : 0; }
  double block(int at) const {
    return smallest > 0 ? sum_from(weights + at, smallest) : sums[at / kWalkBlock];
  }
};

// The token where the sum of the kept weights passes `target`.
int walk(const Kept& kept, double target) {
  double sum = 0;
  for (int at = 0; at < kept.size; at += kWalkBlock) {
    const double block = kept.block(at);
    double within = sum;
    for (int i = at; sum + block > target && i < at + kWalkBlock; ++i) {
      within += kept(i);
      if (within > target && kept(i) > 0) return i;
    }
    sum += block;
  }
  return last_positive(kept.size, kept);
}

// Leaves only the first `kept` of the weights that equal `weight`.
void drop_ties(float* weights, int size, float weight, int kept) {
  for (int i = 0; i < size; ++i)
    if (weights[i] == weight && --kept < 0) weights[i] = 0;
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
  const int blocks = (call.size + kWalkBlock - 1) / kWalkBlock, size = blocks * kWalkBlock;
  double* const sums = static_cast<double*>(thread_scratch(sizeof(double) * blocks + sizeof(float) * size, 1));
  float* const weights = reinterpret_cast<float*>(sums + blocks);
  weigh(call, largest, smallest, weights, sums);
  double whole = 0;
  for (int block = 0; block < blocks; ++block) whole += sums[block];
  if (call.top_p >= 1) return walk({weights, sums, size, 0}, call.uniform * whole);
  const Boundary boundary = find_boundary(weights, size, call.top_p * whole);
  if (boundary.kept < boundary.ties) drop_ties(weights, size, boundary.weight, boundary.kept);
  double kept = 0;
  for (int at = 0; at < size; at += kWalkBlock) kept += sum_from(weights + at, boundary.weight);
  return walk({weights, sums, size, boundary.weight}, call.uniform * kept);
}

}  // namespace octavo::OCTAVO_ISA
