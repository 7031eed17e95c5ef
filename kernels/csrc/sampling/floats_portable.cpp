// Drawing from float32 logits: a weight for each, and sums of blocks of them.
#include <algorithm>
#include <cstring>

#include "attention/vectors.h"
#include "runtime/threads.h"
#include "sampling/changes.h"
#include "sampling/nucleus.h"
#include "sampling/walk.h"

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

// Weights of the logits, 0 for those that min_p or a `smallest` logit leaves out and up to the end of the
// last block, and the sums of blocks of them. `counts`: theirs, if they are wanted.
void weigh(const RowDraw& call, const float* all, float largest, float smallest, float* weights, double* sums,
           Counts* counts) {
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
    if (counts != nullptr) counts->add(weights + at, kWalkBlock);
  }
}

// The token where the sum of the weights that may be drawn, of which there are `sums` of blocks, passes
// `target`. `ties`: how many of the weights up to the end of a block, among those equal to `least`, may be.
template <class Ties>
int walk(const float* weights, const double* sums, int blocks, double target, float least, Ties ties) {
  double sum = 0;
  int block = 0, last = 0;
  for (; block < blocks && sum + sums[block] <= target; ++block) {
    sum += sums[block];
    if (sums[block] > 0) last = block;
  }
  if (block == blocks) block = last;  // rounding put the target beyond all
  int left = ties(block), found = 0;
  for (int i = block * kWalkBlock; i < (block + 1) * kWalkBlock && sum <= target; ++i) {
    const bool kept = weights[i] > least || (weights[i] == least && left-- > 0);
    if (!kept) continue;
    sum += weights[i];
    found = i;
  }
  return found;
}

// A copy of the row with its changes made.
const float* changed(const RowDraw& call) {
  const bool* const allowed = call.changes.allowed;
  const float* const logits = static_cast<const float*>(call.logits);
  float* const row = static_cast<float*>(thread_scratch(sizeof(float) * call.size, 2));
  if (allowed == nullptr) std::copy_n(logits, call.size, row);
  else
    for (int i = 0; i < call.size; ++i) row[i] = allowed[i] ? logits[i] : -__builtin_inff();
  make_changes(call.changes, row);
  return row;
}

int draw_from_finite(const RowDraw& call, const float* logits, float largest) {
  if (call.temperature == 0) {
    int i = 0;
    while (logits[i] != largest) ++i;
    return i;
  }
  const bool cut = call.top_k > 0 && call.top_k < call.size;
  const float smallest = cut ? kth_largest(logits, call.size, call.top_k) : -__builtin_inff();
  const int blocks = (call.size + kWalkBlock - 1) / kWalkBlock, size = blocks * kWalkBlock;
  double* const sums =
      static_cast<double*>(thread_scratch(sizeof(double) * blocks + sizeof(float) * size, 1));
  float* const weights = reinterpret_cast<float*>(sums + blocks);
  Counts counts{};
  weigh(call, logits, largest, smallest, weights, sums, call.top_p < 1 ? &counts : nullptr);
  const auto total = [&] {
    double sum = 0;
    for (int block = 0; block < blocks; ++block) sum += sums[block];
    return sum;
  };
  if (call.top_p >= 1) return walk(weights, sums, blocks, call.uniform * total(), 0, [](int) { return 0; });
  const Nucleus nucleus = find_nucleus(weights, sums, blocks, counts, call.top_p * total());
  return walk(weights, sums, blocks, call.uniform * total(), nucleus.end.weight,
              [&](int block) { return nucleus.ties_in(block); });
}

double log_of_total(const float* logits, int size, float largest) {
  const Vec most = Vec{} + largest;
  double sum = 0;
  for (int at = 0; at < size; at += kWalkBlock) {
    float powers[kWalkBlock];
    const int count = std::min(kWalkBlock, size - at);
    std::fill(std::copy_n(logits + at, count, powers), powers + kWalkBlock, -__builtin_inff());
    for (int i = 0; i < kWalkBlock; i += kLanes)
      store(powers + i, exp_of<Vec, IntVec>(load(powers + i) - most));
    sum += sum_from(powers, 0x1.8p-126f);  // see above_zero
  }
  return largest + std::log(sum);
}

void find_top(const float* logits, int size, RowScores& scores) {
  constexpr int kBlock = 64;
  Top top(scores);
  for (int at = 0; at < size && scores.wanted > 0; at += kBlock) {
    const int end = std::min(size, at + kBlock);
    if (!(largest_of(logits + at, end - at) > top.bound())) continue;
    for (int i = at; i < end; ++i) top.offer(i, logits[i]);
  }
}

void fill(const float* logits, int size, float largest, int token, RowScores& scores) {
  scores.log_total = log_of_total(logits, size, largest);
  find_top(logits, size, scores);
  scores.logit = logits[token];
}

}  // namespace

int draw_from_floats(const RowDraw& call, RowScores* scores) {
  const float* logits = static_cast<const float*>(call.logits);
  float largest = largest_of(logits, call.size);
  if (call.changes.any() && __builtin_isfinite(largest)) {
    logits = changed(call);
    largest = largest_of(logits, call.size);
  }
  if (!__builtin_isfinite(largest)) return kNotFinite;
  const int token = draw_from_finite(call, logits, largest);
  if (scores != nullptr) fill(logits, call.size, largest, token, *scores);
  return token;
}

bool score_floats(const Row& row, int token, RowScores& scores) {
  const float* const logits = static_cast<const float*>(row.logits);
  const float largest = largest_of(logits, row.size);
  if (!__builtin_isfinite(largest)) return false;
  fill(logits, row.size, largest, token, scores);
  return true;
}

}  // namespace octavo::OCTAVO_ISA
