// 16-bit logits by their bit patterns: how often each comes, from the largest value down.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/threads.h"
#include "sampling/changes.h"

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

  // What the `wanted` largest logits, and those that equal the last of them, are above.
  float value_below(int wanted) const {
    int i = 0;
    for (int64_t sum = 0; i < size && sum < wanted; ++i) sum += count(i);
    while (i > 0 && i < size && value(i) == value(i - 1)) ++i;  // both zeros
    return i < size ? value(i) : -__builtin_inff();
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

// `copy`: where the logits go on the way, or null.
inline Histogram count_patterns(const uint16_t* logits, int size, uint16_t* copy = nullptr) {
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
    if (copy != nullptr) std::memcpy(copy + next, &four, sizeof four);
    ++found.counts[four & 0xffff];
    ++found.counts[four >> 16 & 0xffff];
    ++found.counts[four >> 32 & 0xffff];
    ++found.counts[four >> 48];
  }
  for (; next < size; ++next) {
    ++found.counts[logits[next]];
    if (copy != nullptr) copy[next] = logits[next];
  }
  return found;
}

// Fills `pattern` and `values` from `counts`. Positive values come from the largest pattern down to 0,
// negative ones then from 0x8000 upwards. Which patterns of a group occur is not asked by branches: nothing
// foretells them.
inline void order_patterns(Histogram& found, Float type) {
  constexpr int kGroup = 64;
  int size = 0;
  for (int group = 0; group < kPatterns; group += kGroup) {
    const bool positive = group < kPatterns / 2;
    const int low = positive ? kPatterns / 2 - kGroup - group : group;
    const uint32_t* const counts = found.counts + low;
    uint32_t any[16] = {};
    for (int i = 0; i < kGroup; i += 16)
      for (int j = 0; j < 16; ++j) any[j] |= counts[i + j];
    uint32_t all = 0;
    for (int j = 0; j < 16; ++j) all |= any[j];
    if (all == 0) continue;
    for (int i = 0; i < kGroup; ++i) found.values[low + i] = value_of(static_cast<uint16_t>(low + i), type);
    uint16_t* const pattern = found.pattern;
    for (int i = 0; i < kGroup; ++i) {
      const int at = positive ? kGroup - 1 - i : i;
      pattern[size] = static_cast<uint16_t>(low + at);
      size += counts[at] != 0;
    }
  }
  found.size = size;
}

// Where the logits of changed tokens are kept between being counted as they were and as they are.
struct Substitutes {
  uint16_t* row;    // [size], a copy
  float* logits;    // [size], those of changed tokens
  int* ids;         // the changed tokens, each once
  uint64_t* exact;  // logits that 16 bits do not hold
  uint64_t* spare;  // as much room
  float*
      largest;  // [size / kTopBlock, rounded up], of the exact ones of a block; minus infinity: it has none
  int num_ids, num_exact;
};

inline Substitutes room_for_substitutes(const RowDraw& call) {
  const auto size = static_cast<std::size_t>(call.size), blocks = (size + kTopBlock - 1) / kTopBlock;
  std::size_t most = 0;  // changed tokens
  for_each_list(call.changes, [&](const TokenList& list) { most += static_cast<std::size_t>(list.count); });
  char* at = static_cast<char*>(thread_scratch(most * (8 + 8 + 4) + blocks * 4 + size * (4 + 2), 1));
  Substitutes room{};
  const auto take = [&]<class T>(T*& array, std::size_t count) {
    array = reinterpret_cast<T*>(at);
    at += count * sizeof(T);
  };
  take(room.exact, most);
  take(room.spare, most);
  take(room.ids, most);
  take(room.largest, blocks);
  take(room.logits, size);
  take(room.row, size);
  std::fill_n(room.largest, blocks, -__builtin_inff());
  return room;
}

// Takes the logits of changed tokens out of the row and its counts. The row must hold no NaN: one marks them.
inline void take_out(const RowDraw& call, Substitutes& changed, Histogram& found) {
  constexpr uint16_t kTaken = 0x7fff;
  for_each_changed(call.changes, [&](int64_t id) {
    uint16_t& bits = changed.row[id];
    if (bits == kTaken) return;
    changed.logits[id] = value_of(bits, call.type);
    changed.ids[changed.num_ids++] = static_cast<int>(id);
    --found.counts[bits];
    bits = kTaken;
  });
}

// Sorts by the upper 32 bits, the lowest first: byte after byte, where there are too many for comparisons.
inline void sort_by_key(uint64_t* items, uint64_t* spare, int count) {
  constexpr int kDigits = 4, kValues = 256, kFew = 100;
  if (count < kFew) return std::sort(items, items + count);
  uint32_t starts[kDigits][kValues] = {};
  const auto digit_of = [](uint64_t item, int digit) { return item >> (32 + 8 * digit) & (kValues - 1); };
  for (int i = 0; i < count; ++i)
    for (int digit = 0; digit < kDigits; ++digit) ++starts[digit][digit_of(items[i], digit)];
  for (int digit = 0; digit < kDigits; ++digit) {
    uint32_t next = 0;
    for (uint32_t& start : starts[digit]) next += std::exchange(start, next);
    for (int i = 0; i < count; ++i) spare[starts[digit][digit_of(items[i], digit)]++] = items[i];
    std::swap(items, spare);  // an even number of times
  }
}

// Puts them back where 16 bits hold what they have become; the others are left as `exact`, the largest first:
// key of the logit, then the token. False if one is a NaN.
inline bool put_back(const RowDraw& call, Substitutes& changed, Histogram& found) {
  for (int i = 0; i < changed.num_ids; ++i) {
    const int id = changed.ids[i];
    const float logit = changed.logits[id];
    if (logit != logit) return false;
    const uint16_t bits = call.type == Float::bf16 ? float_to_bf16(logit) : float_to_f16(logit);
    if (value_of(bits, call.type) == logit) {
      changed.row[id] = bits;
      ++found.counts[bits];
    } else {
      const auto descending = static_cast<uint32_t>(ordered_key(logit)) ^ 0x7fffffff;
      changed.exact[changed.num_exact++] =
          static_cast<uint64_t>(descending) << 32 | static_cast<uint32_t>(id);
    }
  }
  sort_by_key(changed.exact, changed.spare, changed.num_exact);
  return true;
}

// Orders the patterns, with the exact logits as patterns that no other logit has. False if there are too few.
inline bool order_substitutes(const RowDraw& call, Substitutes& changed, Histogram& found) {
  uint16_t* const free = found.spare;
  int num_free = 0;  // what is free is known before order_patterns: it lists what occurs
  for (int i = 1; i <= kPatterns && num_free < changed.num_exact; ++i) {
    // The most negative values first: find_top need not look closer at a block because of such a pattern.
    const auto bits = static_cast<uint16_t>((0x8000 | infinity_of(call.type)) - i);
    if (found.counts[bits] == 0) free[num_free++] = bits;
  }
  order_patterns(found, call.type);
  int used = 0;
  for (int i = 0; i < changed.num_exact; ++i) {
    const int id = static_cast<int>(changed.exact[i] & 0xffffffff);
    const float logit = float_of_key(static_cast<int32_t>(changed.exact[i] >> 32 ^ 0x7fffffff));
    if (used == 0 || found.values[free[used - 1]] != logit) {
      if (used == num_free) return false;
      found.values[free[used]] = logit;
      found.counts[free[used++]] = 0;
    }
    changed.row[id] = free[used - 1];
    float& largest = changed.largest[id / kTopBlock];
    largest = logit > largest ? logit : largest;
    ++found.counts[free[used - 1]];
  }
  // Both lists are in order: merge from the end, where there is room.
  for (int a = found.size, b = used, to = found.size += used; b > 0;) {
    const bool from_free = a == 0 || found.values[found.pattern[a - 1]] >= found.values[free[b - 1]];
    found.pattern[--to] = from_free ? free[--b] : found.pattern[--a];
  }
  return true;
}

}  // namespace
}  // namespace octavo
