// Sampling from float32 logits, by weights and their sums over blocks.
#include <algorithm>
#include <cstring>

#include "runtime/threads.h"
#include "sampling/maxima.h"
#include "sampling/nucleus.h"
#include "sampling/weights.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Returns the k-th largest logit, 0 < k < size. The k-th largest of the blocks' maxima is a lower bound, so
// for a small k nearly all blocks are skipped.
float kth_largest(const Scanned& row, int k) {
  const int blocks = (row.size + kTopBlock - 1) / kTopBlock;
  float* const ordered = static_cast<float*>(thread_scratch(sizeof(float) * (blocks + row.size)));
  float* const candidates = ordered + blocks;
  const auto larger = [](float a, float b) { return a > b; };
  float bound = -__builtin_inff();
  if (k <= blocks) {
    std::copy_n(row.maxima, blocks, ordered);
    std::nth_element(ordered, ordered + k - 1, ordered + blocks, larger);
    bound = ordered[k - 1];
  }
  int count = 0;
  for (int block = 0; block < blocks; ++block) {
    if (row.maxima[block] < bound) continue;
    for (int i = block * kTopBlock; i < std::min(row.size, (block + 1) * kTopBlock); ++i) {
      candidates[count] = row.logits[i];
      count += row.logits[i] >= bound;
    }
  }
  std::nth_element(candidates, candidates + k - 1, candidates + count, larger);
  return candidates[k - 1];
}

// Returns the token at which the running sum of eligible weights passes `target`. `sums`: sums of eligible
// weights by block. `ties(block)`: how many weights equal to `least` are eligible in this block and later
// ones.
template <class Ties>
int walk(const Weights& row, const double* sums, double target, float least, Ties ties) {
  double sum = 0;
  int block = 0, last = 0;
  for (; block < row.blocks() && sum + sums[block] <= target; ++block) {
    sum += sums[block];
    if (sums[block] > 0) last = block;
  }
  if (block == row.blocks()) block = last;  // rounding has put the target beyond the total
  float weights[kWalkBlock] = {};
  row.of_block(block, weights);
  int left = ties(block), found = 0;
  for (int i = 0; i < kWalkBlock && sum <= target; ++i) {
    const bool kept = weights[i] > least || (weights[i] == least && left-- > 0);
    if (!kept) continue;
    sum += weights[i];
    found = block * kWalkBlock + i;
  }
  return found;
}

int first_largest(const Scanned& row, float largest) {
  int block = 0;
  while (row.maxima[block] != largest) ++block;
  int i = block * kTopBlock;
  while (row.logits[i] != largest) ++i;
  return i;
}

double sum_of(const double* sums, int blocks) {
  double sum = 0;
  for (int block = 0; block < blocks; ++block) sum += sums[block];
  return sum;
}

int draw_from_finite(const RowDraw& call, const Scanned& row, float largest, double* sums) {
  if (call.temperature == 0) return first_largest(row, largest);
  const bool cut = call.top_k > 0 && call.top_k < call.size;
  const float smallest = cut ? kth_largest(row, call.top_k) : -__builtin_inff();
  const Weights weights{row, largest, call.temperature, smallest, call.min_p};
  const int blocks = weights.blocks();
  if (call.top_p >= 1) {
    for (int block = 0; block < blocks; ++block) sums[block] = weights.sum_of(block);
    return walk(weights, sums, call.uniform * sum_of(sums, blocks), 0, [](int) { return 0; });
  }
  const Nucleus nucleus = find_nucleus(weights, sums, call.top_p);
  return walk(weights, sums, call.uniform * sum_of(sums, blocks), nucleus.end.weight,
              [&](int block) { return nucleus.ties_in(block); });
}

// Returns the sum of exp(logit - largest) over the row.
double sum_of_powers(const Scanned& row, float largest) {
  const Weights weights{row, largest, 1, -__builtin_inff(), 0};
  double sum = 0;
  for (int block = 0; block < weights.blocks(); ++block) sum += weights.sum_of(block);
  return sum;
}

void find_top(const Scanned& row, RowScores& scores) {
  Top top(scores);
  if (scores.wanted == 0) return;
  for (int at = 0; at < row.size; at += kTopBlock) {
    if (!(row.maxima[at / kTopBlock] > top.bound())) continue;
    for (int i = at; i < std::min(row.size, at + kTopBlock); ++i) top.offer(i, row.logits[i]);
  }
}

// Fills in a row's log-probability data.
void fill(const Scanned& row, float largest, int token, RowScores& scores) {
  scores.log_total = largest + std::log(sum_of_powers(row, largest));
  find_top(row, scores);
  scores.logit = row.logits[token];
}

// Memory for a row's block maxima and block sums.
struct Room {
  double* sums;
  float* maxima;
};

Room room_for(int size) {
  const int blocks = (size + kWalkBlock - 1) / kWalkBlock;
  double* const sums =
      static_cast<double*>(thread_scratch(sizeof(double) * blocks + sizeof(float) * Scanned::room(size), 1));
  return {sums, reinterpret_cast<float*>(sums + blocks)};
}

const float* as_floats(const Row& row) {
  if (row.type == Float::f32) return static_cast<const float*>(row.logits);
  float* const floats = static_cast<float*>(thread_scratch(sizeof(float) * row.size, 3));
  load_floats(row.logits, row.type, 0, row.size, floats);
  return floats;
}

// Applies the changes to a copy of the row, and updates the maxima of changed blocks.
void change(const RowDraw& call, Scanned& row) {
  const bool* const allowed = call.changes.allowed;
  float* const copy = static_cast<float*>(thread_scratch(sizeof(float) * call.size, 2));
  if (allowed == nullptr) std::copy_n(row.logits, call.size, copy);
  else
    for (int i = 0; i < call.size; ++i) copy[i] = allowed[i] ? row.logits[i] : -__builtin_inff();
  make_changes(call.changes, copy);
  row.logits = copy;
  if (allowed != nullptr) row.scan_all();
  else for_each_changed(call.changes, [&](int64_t id) { row.scan(static_cast<int>(id / kTopBlock)); });
}

}  // namespace

int draw_token(const RowDraw& call, RowScores* scores) {
  const Room room = room_for(call.size);
  Scanned row{as_floats(call), call.size, room.maxima};
  row.scan_all();
  float largest = row.largest();
  if (call.changes.any() && __builtin_isfinite(largest)) {
    change(call, row);
    largest = row.largest();
  }
  if (!__builtin_isfinite(largest)) return kNotFinite;
  const int token = draw_from_finite(call, row, largest, room.sums);
  if (scores != nullptr) fill(row, largest, token, *scores);
  return token;
}

bool score_token(const Row& call, int token, RowScores& scores) {
  Scanned row{as_floats(call), call.size, room_for(call.size).maxima};
  row.scan_all();
  const float largest = row.largest();
  if (!__builtin_isfinite(largest)) return false;
  fill(row, largest, token, scores);
  return true;
}

}  // namespace octavo::OCTAVO_ISA
