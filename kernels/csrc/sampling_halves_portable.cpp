// Drawing from 16-bit logits by counting them: a vocabulary of 152k has a few thousand different
// values at most, so all of the selection is done on those, once each.
#include "sampling_histogram.h"
#include "sampling_walk.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Those of equal weight of which only the first ones, in order of id, may be drawn: patterns
// [first, end) of a histogram. `kept` is 0 where there are none.
struct Ties {
  int first = 0, end = 0, kept = 0;
};

bool is_finite(const Histogram& found) {
  const float largest = found.value(0), last = found.value(found.size - 1);
  return __builtin_isfinite(largest) && last == last;
}

// The same of a row that was not counted.
bool is_finite(const uint16_t* logits, int size, uint16_t infinity) {
  uint16_t bad = 0, good = 0;
  for (int i = 0; i < size; ++i) {
    const uint16_t magnitude = logits[i] & 0x7fff;
    bad |= magnitude > infinity || logits[i] == infinity;
    good |= magnitude < infinity;
  }
  return bad == 0 && good != 0;
}

int first_largest(const uint16_t* logits, const Histogram& found) {
  const float largest = found.value(0);
  int i = 0;
  while (found.values[logits[i]] != largest) ++i;
  return i;
}

void keep_top_k(const RowDraw& call, Histogram& found) {
  int end = 0;
  for (int64_t kept = 0; end < found.size && kept < call.top_k; ++end) kept += found.count(end);
  const float smallest = found.value(end - 1);
  while (end < found.size && found.value(end) == smallest) ++end;  // both zeros
  for (int i = end; i < found.size; ++i) found.weight(i) = 0;
  found.size = end;
}

// Weights in descending order; those below min_p are dropped.
void weigh(const RowDraw& call, Histogram& found) {
  const float largest = found.value(0);
  float before = 1;
  for (int i = 0; i < found.size; ++i) {
    const float weight = weight_of(found.value(i), largest, call.temperature);
    before = found.weight(i) = weight < before ? weight : before;
    if (before < call.min_p) return found.drop_from(i);
  }
}

double mass(Histogram& found) {
  double sum = 0;
  for (int i = 0; i < found.size; ++i) sum += static_cast<double>(found.weight(i)) * found.count(i);
  return sum;
}

Ties keep_nucleus(double target, Histogram& found) {
  double above = 0;
  for (int i = 0; i < found.size;) {
    const int next = found.next_weight(i);
    const float weight = found.weight(i);
    const uint32_t count = found.count_between(i, next);
    if (above + static_cast<double>(weight) * count >= target || next == found.size) {
      const int kept = needed_ties(above, target, weight, static_cast<int>(count));
      found.drop_from(next);
      return static_cast<uint32_t>(kept) < count ? Ties{i, next, kept} : Ties{};
    }
    above += static_cast<double>(weight) * count;
    i = next;
  }
  return {};
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

int draw_from_histogram(const RowDraw& call, const uint16_t* logits, Histogram& found) {
  if (!is_finite(found)) return kNotFinite;
  if (call.temperature == 0) return first_largest(logits, found);
  if (call.top_k > 0 && call.top_k < call.size) keep_top_k(call, found);
  weigh(call, found);
  double whole = mass(found);
  Ties ties;
  if (call.top_p < 1) {
    ties = keep_nucleus(call.top_p * whole, found);
    whole = mass(found);
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

// The row as float32, with its changes left to be made.
int draw_as_floats(const RowDraw& call) {
  const uint16_t* const logits = static_cast<const uint16_t*>(call.logits);
  float* const floats = static_cast<float*>(thread_scratch(sizeof(float) * call.size, 3));
  for (int i = 0; i < call.size; ++i) floats[i] = value_of(logits[i], call.type);
  RowDraw as_floats = call;
  as_floats.logits = floats;
  as_floats.type = Float::f32;
  return draw_from_floats(as_floats);
}

int draw_changed(const RowDraw& call) {
  const uint16_t* const logits = static_cast<const uint16_t*>(call.logits);
  const uint16_t infinity = infinity_of(call.type);
  if (!is_finite(logits, call.size, infinity)) return kNotFinite;
  for (int i = 0; i < call.changes.count; ++i)
    if (call.changes.values[i] != call.changes.values[i]) return kNotFinite;
  uint16_t* const row = static_cast<uint16_t*>(thread_scratch(3 * static_cast<std::size_t>(call.size), 1));
  const bool* const allowed = call.changes.allowed;
  if (allowed == nullptr) std::copy_n(logits, call.size, row);
  else for (int i = 0; i < call.size; ++i) row[i] = allowed[i] ? logits[i] : static_cast<uint16_t>(0x8000 | infinity);
  Histogram found = count_patterns(row, call.size);
  if (!substitute(call, row, reinterpret_cast<uint8_t*>(row + call.size), found)) return draw_as_floats(call);
  return draw_from_histogram(call, row, found);
}

}  // namespace

int draw_from_halves(const RowDraw& call) {
  if (call.changes.any()) return draw_changed(call);
  const uint16_t* const logits = static_cast<const uint16_t*>(call.logits);
  Histogram found = count_patterns(logits, call.size);
  order_patterns(found, call.type);
  return draw_from_histogram(call, logits, found);
}

}  // namespace octavo::OCTAVO_ISA
