// 16-bit logits by their bit patterns: how often each comes, from the largest value down.
#pragma once

#include <algorithm>
#include <cstring>

#include "sampling.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int kPatterns = 1 << 16;

inline float value_of(uint16_t bits, Float type) {
  return type == Float::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

inline uint16_t infinity_of(Float type) { return type == Float::bf16 ? 0x7f80 : 0x7c00; }

// Different bit patterns of the row, from the largest value down, and what is known of each. The
// arrays by pattern are meaningful at patterns that occur.
struct Histogram {
  uint32_t* counts;   // [kPatterns]
  float* values;      // [kPatterns]
  float* weights;     // [kPatterns]
  uint16_t* pattern;  // [size]
  uint16_t* spare;    // [kPatterns]
  int size = 0;

  uint32_t count(int i) const { return counts[pattern[i]]; }
  float value(int i) const { return values[pattern[i]]; }
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

inline Histogram count_patterns(const uint16_t* logits, int size) {
  static_assert(sizeof(float) == sizeof(uint32_t));
  char* const scratch = static_cast<char*>(thread_scratch(kPatterns * (4 + 4 + 4 + 2 + 2)));
  const auto at = [&](int bytes) { return scratch + static_cast<std::size_t>(bytes) * kPatterns; };
  Histogram found{reinterpret_cast<uint32_t*>(scratch), reinterpret_cast<float*>(at(4)),
                  reinterpret_cast<float*>(at(8)), reinterpret_cast<uint16_t*>(at(12)),
                  reinterpret_cast<uint16_t*>(at(14))};
  std::memset(found.counts, 0, 4 * kPatterns);
  int next = 0;
  for (; next + 4 <= size; next += 4) {  // one load for four: loads and stores are all there is to do
    uint64_t four;
    std::memcpy(&four, logits + next, sizeof four);
    ++found.counts[four & 0xffff];
    ++found.counts[four >> 16 & 0xffff];
    ++found.counts[four >> 32 & 0xffff];
    ++found.counts[four >> 48];
  }
  for (; next < size; ++next) ++found.counts[logits[next]];
  return found;
}

// Fills `pattern` and `values` from `counts`. Positive values come from the largest pattern down to 0,
// negative ones then from 0x8000 upwards.
inline void order_patterns(Histogram& found, Float type) {
  constexpr int kGroup = 16;
  for (int group = 0; group < kPatterns; group += kGroup) {
    const bool positive = group < kPatterns / 2;
    const int low = positive ? kPatterns / 2 - kGroup - group : group;
    uint32_t any = 0;
    for (int i = 0; i < kGroup; ++i) any |= found.counts[low + i];
    for (int i = 0; any != 0 && i < kGroup; ++i) {
      const int bits = positive ? low + kGroup - 1 - i : low + i;
      if (found.counts[bits] == 0) continue;
      found.values[bits] = value_of(static_cast<uint16_t>(bits), type);
      found.pattern[found.size++] = static_cast<uint16_t>(bits);
    }
  }
}

// Puts changed logits into a counted copy of the row: as patterns of their own value where 16 bits hold it, else
// as patterns that no logit has. False if there are too few of those.
inline bool substitute(const RowDraw& call, uint16_t* row, uint8_t* seen, Histogram& found) {
  const RowChanges& changes = call.changes;
  std::memset(seen, 0, static_cast<std::size_t>(call.size));
  for (int i = 0; i < changes.count; ++i) {
    const int64_t id = changes.ids[i];
    if (seen[id] != 0) continue;
    seen[id] = 1;
    --found.counts[row[id]];
  }
  int* const left = reinterpret_cast<int*>(found.weights);  // changes that no 16-bit value equals
  int num_left = 0;
  for (int i = 0; i < changes.count; ++i) {
    const int64_t id = changes.ids[i];
    if (seen[id] == 0) continue;
    seen[id] = 0;
    const uint16_t bits =
        call.type == Float::bf16 ? float_to_bf16(changes.values[i]) : float_to_f16(changes.values[i]);
    if (value_of(bits, call.type) == changes.values[i]) {
      row[id] = bits;
      ++found.counts[bits];
    } else if (num_left == kPatterns) {
      return false;
    } else {
      left[num_left++] = i;
    }
  }
  std::sort(left, left + num_left, [&](int a, int b) { return changes.values[a] > changes.values[b]; });
  int num_free = 0;  // what is free is known before order_patterns: it lists what occurs
  uint16_t* const free = found.spare;
  for (int bits = 0; bits < kPatterns && num_free < num_left; ++bits)
    if (found.counts[bits] == 0) free[num_free++] = static_cast<uint16_t>(bits);
  if (num_free < num_left) return false;
  order_patterns(found, call.type);
  const int natural = found.size;
  for (int i = 0; i < num_left; ++i) {
    row[changes.ids[left[i]]] = free[i];
    found.counts[free[i]] = 1;
    found.values[free[i]] = changes.values[left[i]];
  }
  // Both lists are in order: merge from the end, where there is room.
  found.size += num_left;
  for (int to = found.size, a = natural, b = num_left; b > 0;) {
    const bool from_free = a == 0 || found.values[found.pattern[a - 1]] >= found.values[free[b - 1]];
    found.pattern[--to] = from_free ? free[--b] : found.pattern[--a];
  }
  return true;
}

}  // namespace
}  // namespace octavo
