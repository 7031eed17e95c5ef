// Drawing from 16-bit logits by counting them: a vocabulary of 152k has a few thousand different
// values at most, so all of the selection is done on those, once each.
#include "sampling/histogram.h"
#include "sampling/select.h"
#include "sampling/walk.h"

namespace octavo::OCTAVO_ISA {
namespace {

bool is_finite(const Histogram& found) {
  const float largest = found.value(0), last = found.value(found.size - 1);
  return __builtin_isfinite(largest) && last == last;
}

// The same of a row whose patterns were counted but not ordered.
bool counts_are_finite(const Histogram& found, int size, uint16_t infinity) {
  constexpr int kSign = 0x8000;
  uint32_t bad = 0;
  for (int bits = infinity; bits < kSign; ++bits) bad |= found.counts[bits];
  for (int bits = kSign + infinity + 1; bits < kPatterns; ++bits) bad |= found.counts[bits];
  return bad == 0 && found.counts[kSign + infinity] < static_cast<uint32_t>(size);
}

// An integer that orders as the values do, but for zeros: the negative one is below the other.
int16_t order_of(uint16_t bits) {
  const auto all = static_cast<int16_t>(bits);
  return static_cast<int16_t>(all ^ (all >> 15 & 0x7fff));
}

int16_t largest_order(const uint16_t* logits, int size) {
  int16_t largest = INT16_MIN;
  for (int i = 0; i < size; ++i) largest = std::max(largest, order_of(logits[i]));
  return largest;
}

// The same of a row that was not counted: a NaN is beyond the infinity of its sign.
bool is_finite(const uint16_t* logits, int size, uint16_t infinity) {
  const int16_t above = order_of(infinity), below = order_of(0x8000 | infinity);
  int16_t smallest = INT16_MAX;
  for (int i = 0; i < size; ++i) smallest = std::min(smallest, order_of(logits[i]));
  const int16_t largest = largest_order(logits, size);
  return smallest >= below && largest > below && largest < above;
}

// The first of the largest of a finite row.
int find_largest(const uint16_t* logits, int size) {
  int16_t largest = largest_order(logits, size);
  if (largest == 0) largest = -1;  // either zero
  int at = 0;
  while (at + kTopBlock < size && largest_order(logits + at, kTopBlock) < largest) at += kTopBlock;
  while (order_of(logits[at]) < largest) ++at;
  return at;
}

// Whether one of the values is `one` or `other`.
bool holds(const uint16_t* values, int count, uint16_t one, uint16_t other) {
  uint16_t any = 0;
  for (int i = 0; i < count; ++i) any |= (values[i] == one) | (values[i] == other);
  return any != 0;
}

int first_largest(const uint16_t* logits, int size, const Histogram& found) {
  const uint16_t one = found.pattern[0];
  const bool zeros = found.size > 1 && found.value(1) == found.value(0);
  const uint16_t other = zeros ? found.pattern[1] : one;
  int at = 0;
  while (!holds(logits + at, std::min(kTopBlock, size - at), one, other)) at += kTopBlock;
  while (logits[at] != one && logits[at] != other) ++at;
  return at;
}

// One past the id of the last tie that is kept.
int end_of_ties(const uint16_t* logits, int size, Histogram& found, const Ties& ties) {
  int left = ties.kept;
  if (ties.end == ties.first + 1) {  // one pattern, as nearly always: compare whole blocks
    const uint16_t pattern = found.pattern[ties.first];
    for (int at = 0;; at += kWalkBlock) {
      uint16_t inside = 0;
      if (at + kWalkBlock <= size)
        for (int i = 0; i < kWalkBlock; ++i) inside += logits[at + i] == pattern;
      if (at + kWalkBlock <= size && inside < left) {
        left -= inside;
        continue;
      }
      for (int i = at;; ++i)
        if (logits[i] == pattern && --left == 0) return i + 1;
    }
  }
  const float weight = found.weight(ties.first);
  for (int i = 0;; ++i)
    if (found.weights[logits[i]] == weight && --left == 0) return i + 1;
}

int draw_from_finite(const RowDraw& call, const uint16_t* logits, Histogram& found) {
  if (call.temperature == 0) return first_largest(logits, call.size, found);
  if (call.top_k > 0 && call.top_k < call.size) keep_top_k(call, found);
  double whole = weigh(call, found);
  Ties ties;
  if (call.top_p < 1) {
    ties = keep_nucleus(call.top_p * whole, found, whole);
  }
  const auto weight = [&](int i) { return found.weights[logits[i]]; };
  int limit = call.size;
  if (ties.kept > 0) {
    const uint32_t left_out = found.count_between(ties.first, ties.end) - static_cast<uint32_t>(ties.kept);
    whole -= static_cast<double>(found.weight(ties.first)) * left_out;
    limit = end_of_ties(logits, call.size, found, ties);
  }
  Walk walk{call.uniform * whole};
  if (const int id = walk.pass(0, limit, weight); id != kNotFinite) return id;
  for (int i = ties.first; i < ties.end; ++i) found.weight(i) = 0;
  if (const int id = walk.pass(limit, call.size, weight); id != kNotFinite) return id;
  const int id = last_positive(call.size, weight);
  return ties.kept > 0 && id < limit ? limit - 1 : id;
}

double log_of_total(const Histogram& found) {
  constexpr int kBlock = 64;
  const float largest = found.value(0);
  double sum = 0;
  for (int at = 0; at < found.size; at += kBlock) {
    float powers[kBlock] = {};
    const int count = std::min(kBlock, found.size - at);
    for (int i = 0; i < count; ++i) powers[i] = found.value(at + i) - largest;
    for (float& power : powers) power = exp_float(power);
    for (int i = 0; i < count; ++i) sum += static_cast<double>(powers[i]) * found.count(at + i);
  }
  return largest + std::log(sum);
}

// The highest order of values that are not above `bound`.
int16_t order_below(float bound, Float type) {
  const uint16_t bits = type == Float::bf16 ? float_to_bf16(bound) : float_to_f16(bound);
  return static_cast<int16_t>(order_of(bits) - (value_of(bits, type) > bound));
}

// The likeliest tokens. `substituted`: the largest of each block that a pattern stands for which is not its
// own value; null where every pattern is.
void find_top(const uint16_t* logits, const Row& row, const float* substituted, const Histogram& found,
              RowScores& scores) {
  Top top(scores);
  if (scores.wanted == 0) return;
  const float below = found.value_below(scores.wanted);
  const auto is_likely = [&](int begin, int end) {
    const float bound = std::max(below, top.bound());
    for (int at = begin; substituted != nullptr && at < end; at += kTopBlock)
      if (substituted[at / kTopBlock] > bound) return true;
    return largest_order(logits + begin, end - begin) > order_below(bound, row.type);
  };
  for (int walk = 0; walk < row.size; walk += kWalkBlock) {
    const int last = std::min(row.size, walk + kWalkBlock);
    if (!is_likely(walk, last)) continue;
    for (int at = walk; at < last; at += kTopBlock) {
      const int end = std::min(last, at + kTopBlock);
      if (!is_likely(at, end)) continue;
      for (int i = at; i < end; ++i) top.offer(i, found.values[logits[i]]);
    }
  }
}

int draw_from_histogram(const RowDraw& call, const uint16_t* logits, const float* substituted,
                        Histogram& found, RowScores* scores) {
  if (!is_finite(found)) return kNotFinite;
  if (scores != nullptr) {
    scores->log_total = log_of_total(found);
    find_top(logits, call, substituted, found, *scores);
  }
  const int token = draw_from_finite(call, logits, found);
  if (scores != nullptr) scores->logit = found.values[logits[token]];
  return token;
}

// The row as float32, with its changes left to be made.
int draw_as_floats(const RowDraw& call, RowScores* scores) {
  const uint16_t* const logits = static_cast<const uint16_t*>(call.logits);
  float* const floats = static_cast<float*>(thread_scratch(sizeof(float) * call.size, 3));
  for (int i = 0; i < call.size; ++i) floats[i] = value_of(logits[i], call.type);
  RowDraw as_floats = call;
  as_floats.logits = floats;
  as_floats.type = Float::f32;
  return draw_from_floats(as_floats, scores);
}

int draw_changed(const RowDraw& call, RowScores* scores) {
  const uint16_t* const logits = static_cast<const uint16_t*>(call.logits);
  const uint16_t infinity = infinity_of(call.type);
  Substitutes changed = room_for_substitutes(call);
  const bool* const allowed = call.changes.allowed;
  if (allowed != nullptr) {
    if (!is_finite(logits, call.size, infinity)) return kNotFinite;
    const uint16_t nothing = 0x8000 | infinity;
    for (int i = 0; i < call.size; ++i) changed.row[i] = allowed[i] ? logits[i] : nothing;
  }
  Histogram found = allowed != nullptr ? count_patterns(changed.row, call.size)
                                       : count_patterns(logits, call.size, changed.row);
  if (!counts_are_finite(found, call.size, infinity)) return kNotFinite;
  take_out(call, changed, found);
  make_changes(call.changes, changed.logits);
  if (!put_back(call, changed, found)) return kNotFinite;
  if (!order_substitutes(call, changed, found)) return draw_as_floats(call, scores);
  return draw_from_histogram(call, changed.row, changed.largest, found, scores);
}

}  // namespace

int draw_from_halves(const RowDraw& call, RowScores* scores) {
  if (call.changes.any()) return draw_changed(call, scores);
  const uint16_t* const logits = static_cast<const uint16_t*>(call.logits);
  if (call.temperature == 0 && scores == nullptr)
    return is_finite(logits, call.size, infinity_of(call.type)) ? find_largest(logits, call.size)
                                                                : kNotFinite;
  Histogram found = count_patterns(logits, call.size);
  order_patterns(found, call.type);
  return draw_from_histogram(call, logits, nullptr, found, scores);
}

bool score_halves(const Row& row, int token, RowScores& scores) {
  const uint16_t* const logits = static_cast<const uint16_t*>(row.logits);
  Histogram found = count_patterns(logits, row.size);
  order_patterns(found, row.type);
  if (!is_finite(found)) return false;
  scores.log_total = log_of_total(found);
  find_top(logits, row, nullptr, found, scores);
  scores.logit = found.values[logits[token]];
  return true;
}

}  // namespace octavo::OCTAVO_ISA
