// Drawing from 16-bit logits by counting them: a vocabulary of 152k has a few thousand different
// values at most, so all of the selection is done on those, once each.
#include <cstring>

#include "sampling_walk.h"
#include "threads.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kPatterns = 1 << 16;

inline float value_of(uint16_t bits, Float type) {
  return type == Float::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// Different bit patterns of the row, from the largest value down, and what is known of each. The
// arrays by pattern are meaningful at patterns that occur.
struct Histogram {
  uint32_t* counts;   // [kPatterns]
  float* weights;     // [kPatterns]
  uint16_t* pattern;  // [size]
  int size = 0;

  uint32_t count(int i) const { return counts[pattern[i]]; }
  float& weight(int i) { return weights[pattern[i]]; }

  // The first pattern after i whose weight is another, or `size`.
  int next_weight(int i) {
    int next = i + 1;
    while (next < size && weight(next) == weight(i)) ++next;
    return next;
  }
  uint32_t count_between(int first, int end) const {
    uint32_t sum = 0;
    for (int i = first; i < end; ++i) sum += count(i);
    return sum;
  }

  // Forget the patterns from `end` on: they weigh nothing.
  void drop_from(int end) {
    for (int i = end; i < size; ++i) weight(i) = 0;
    size = end;
  }
};

// Those of equal weight of which only the first ones, in order of id, may be drawn: patterns
// [first, end) of a histogram. `kept` is 0 where there are none.
struct Ties {
  int first = 0, end = 0, kept = 0;
};

Histogram count_patterns(const RowDraw& call) {
  static_assert(sizeof(float) == sizeof(uint32_t));
  char* const scratch = static_cast<char*>(thread_scratch(kPatterns * (4 + 4 + 2)));
  Histogram found{reinterpret_cast<uint32_t*>(scratch), reinterpret_cast<float*>(scratch + 4 * kPatterns),
                  reinterpret_cast<uint16_t*>(scratch + 8 * kPatterns)};
  std::memset(found.counts, 0, 4 * kPatterns);
  const uint16_t* const logits = static_cast<const uint16_t*>(call.logits);
  int next = 0;
  for (; next + 4 <= call.size; next += 4) {  // one load for four: loads and stores are all there is to do
    uint64_t four;
    std::memcpy(&four, logits + next, sizeof four);
    ++found.counts[four & 0xffff];
    ++found.counts[four >> 16 & 0xffff];
    ++found.counts[four >> 32 & 0xffff];
    ++found.counts[four >> 48];
  }
  for (; next < call.size; ++next) ++found.counts[logits[next]];
  // Positive values come from the largest pattern down to 0, negative ones then from 0x8000 upwards.
  constexpr int kGroup = 16;
  for (int group = 0; group < kPatterns; group += kGroup) {
    const bool positive = group < kPatterns / 2;
    const int low = positive ? kPatterns / 2 - kGroup - group : group;
    uint32_t any = 0;
    for (int i = 0; i < kGroup; ++i) any |= found.counts[low + i];
    for (int i = 0; any != 0 && i < kGroup; ++i) {
      const int bits = positive ? low + kGroup - 1 - i : low + i;
      if (found.counts[bits] != 0) found.pattern[found.size++] = static_cast<uint16_t>(bits);
    }
  }
  return found;
}

bool is_nan(uint16_t bits, Float type) {
  return (bits & 0x7fff) > (type == Float::bf16 ? 0x7f80 : 0x7c00);
}

bool is_finite(const Histogram& found, Float type) {
  const float largest = value_of(found.pattern[0], type);
  return __builtin_isfinite(largest) && !is_nan(found.pattern[found.size - 1], type);
}

int first_largest(const RowDraw& call, float largest) {
  const uint16_t* const logits = static_cast<const uint16_t*>(call.logits);
  int i = 0;
  while (value_of(logits[i], call.type) != largest) ++i;
  return i;
}

void keep_top_k(const RowDraw& call, Histogram& found) {
  int end = 0;
  for (int64_t kept = 0; end < found.size && kept < call.top_k; ++end) kept += found.count(end);
  const float smallest = value_of(found.pattern[end - 1], call.type);
  while (end < found.size && value_of(found.pattern[end], call.type) == smallest) ++end;  // both zeros
  for (int i = end; i < found.size; ++i) found.weight(i) = 0;
  found.size = end;
}

// Weights in descending order; those below min_p are dropped.
void weigh(const RowDraw& call, Histogram& found) {
  const float largest = value_of(found.pattern[0], call.type);
  float before = 1;
  for (int i = 0; i < found.size; ++i) {
    const float weight = weight_of(value_of(found.pattern[i], call.type), largest, call.temperature);
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
int end_of_ties(const RowDraw& call, Histogram& found, const Ties& ties) {
  const uint16_t* const logits = static_cast<const uint16_t*>(call.logits);
  int left = ties.kept;
  if (ties.end == ties.first + 1) {  // one pattern, as nearly always: compare whole blocks
    const uint16_t pattern = found.pattern[ties.first];
    for (int at = 0;; at += kWalkBlock) {
      uint16_t inside = 0;
      if (at + kWalkBlock <= call.size)
        for (int i = 0; i < kWalkBlock; ++i) inside += logits[at + i] == pattern;
      if (at + kWalkBlock <= call.size && inside < left) {
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

}  // namespace

int draw_from_halves(const RowDraw& call) {
  const uint16_t* const logits = static_cast<const uint16_t*>(call.logits);
  Histogram found = count_patterns(call);
  if (!is_finite(found, call.type)) return kNotFinite;
  if (call.temperature == 0) return first_largest(call, value_of(found.pattern[0], call.type));
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
    limit = end_of_ties(call, found, ties);
  }
  Walk walk{call.uniform * whole};
  if (const int id = walk.pass(0, limit, weight); id != kNotFinite) return id;
  for (int i = ties.first; i < ties.end; ++i) found.weight(i) = 0;
  if (const int id = walk.pass(limit, call.size, weight); id != kNotFinite) return id;
  const int id = last_positive(call.size, weight);
  return ties.kept > 0 && id < limit ? limit - 1 : id;
}

}  // namespace octavo::OCTAVO_ISA
