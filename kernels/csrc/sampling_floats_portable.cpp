// Drawing from float32 logits: a weight for each, and sums of blocks of them.
#include <algorithm>
#include <cstring>

#include "attention_math.h"
#include "sampling_nucleus.h"
#include "sampling_walk.h"
#include "threads.h"

namespace octavo::OCTAVO_ISA {
namespace {

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
void weigh(const RowDraw& call, const float* all, float largest, float smallest, float* weights, double* sums) {
  const Vec most = Vec{} + largest, temperature = Vec{} + call.temperature, least = Vec{} + smallest;
  const Vec min_p = Vec{} + (call.min_p > 0x1.8p-126f ? call.min_p : 0x1.8p-126f);  // see above_zero
  for (int at = 0; at < call.size; at += kWalkBlock) {
    const float* logits = all + at;
    float last[kWalkBlock];
    if (call.size - at < kWalkBlock) {
      std::fill(std::copy_n(logits, call.size - at, last), last + kWalkBlock, -__builtin_inff());
      logits = last;
    }
    for (int i = 0; i < kWalkBlock; i += kLanes) {
      const Vec logit = load(logits + i);
      const Vec power = exp_of<Vec, IntVec>((logit - most) / temperature);
      const Vec weight = (Vec)((IntVec)power & (logit >= least) & (power >= min_p));
      store(weights + at + i, weight);
    }
    sums[at / kWalkBlock] = sum_from(weights + at, 0);
  }
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

// A copy of the row with its changes made.
const float* changed(const RowDraw& call) {
  const RowChanges& changes = call.changes;
  const float* const logits = static_cast<const float*>(call.logits);
  float* const row = static_cast<float*>(thread_scratch(sizeof(float) * call.size, 2));
  if (changes.allowed == nullptr) std::copy_n(logits, call.size, row);
  else for (int i = 0; i < call.size; ++i) row[i] = changes.allowed[i] ? logits[i] : -__builtin_inff();
  for (int i = changes.count; i-- > 0;) row[changes.ids[i]] = changes.values[i];  // the first of an id comes last
  return row;
}

int draw_from_finite(const RowDraw& call, const float* logits, float largest) {
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
  weigh(call, logits, largest, smallest, weights, sums);
  double whole = 0;
  for (int block = 0; block < blocks; ++block) whole += sums[block];
  if (call.top_p >= 1) return walk({weights, sums, size, 0}, call.uniform * whole);
  const Boundary boundary = find_boundary(weights, size, call.top_p * whole);
  if (boundary.kept < boundary.ties) drop_ties(weights, size, boundary.weight, boundary.kept);
  double kept = 0;
  for (int at = 0; at < size; at += kWalkBlock) kept += sum_from(weights + at, boundary.weight);
  return walk({weights, sums, size, boundary.weight}, call.uniform * kept);
}

}  // namespace

int draw_from_floats(const RowDraw& call) {
  const float* logits = static_cast<const float*>(call.logits);
  float largest = largest_of(logits, call.size);
  if (call.changes.any() && __builtin_isfinite(largest)) {
    logits = changed(call);
    largest = largest_of(logits, call.size);
  }
  return draw_from_finite(call, logits, largest);
}

}  // namespace octavo::OCTAVO_ISA
