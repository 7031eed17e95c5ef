// 16-bit logits by their bit patterns: how often each comes, from the largest value down.
#pragma once

#include <algorithm>
#include <cstring>

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

// Where the logits of changed tokens are kept between being counted as they were and as they are.
struct Substitutes {
  uint16_t* row;    // [size], a copy
  float* logits;    // [size], those of changed tokens
  int* ids;         // [size], the changed tokens, each once
  uint64_t* exact;  // [size], logits that 16 bits do not hold
  bool* blocks;     // [size / kTopBlock, rounded up], whether one of these is among the tokens of a block
  int num_ids = 0, num_exact = 0;
};

inline Substitutes room_for_substitutes(int size) {
  const std::size_t blocks = (size + kTopBlock - 1) / kTopBlock;
  char* const room =
      static_cast<char*>(thread_scratch(static_cast<std::size_t>(size) * (8 + 4 + 4 + 2) + blocks, 1));
  const auto at = [&](int bytes) { return room + static_cast<std::size_t>(bytes) * size; };
  std::memset(at(18), 0, blocks);
  return {reinterpret_cast<uint16_t*>(at(16)), reinterpret_cast<float*>(at(8)),
          reinterpret_cast<int*>(at(12)), reinterpret_cast<uint64_t*>(room), reinterpret_cast<bool*>(at(18))};
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
  std::sort(changed.exact, changed.exact + changed.num_exact);
  return true;
}

// Orders the patterns, with the exact logits as patterns that no other logit has. False if there are too few.
inline bool order_substitutes(const RowDraw& call, Substitutes& changed, Histogram& found) {
  uint16_t* const free = found.spare;
  int num_free = 0;  // what is free is known before order_patterns: it lists what occurs
  for (int bits = 0; bits < kPatterns && num_free < changed.num_exact; ++bits)
    if (found.counts[bits] == 0) free[num_free++] = static_cast<uint16_t>(bits);
  order_patterns(found, call.type);
  int used = 0;
  for (int i = 0; i < changed.num_exact; ++i) {
    const int id = static_cast<int>(changed.exact[i] & 0xffffffff);
    const float logit = changed.logits[id];
    if (used == 0 || found.values[free[used - 1]] != logit) {
      if (used == num_free) return false;
      found.values[free[used]] = logit;
      found.counts[free[used++]] = 0;
    }
    changed.row[id] = free[used - 1];
    changed.blocks[id / kTopBlock] = true;
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
