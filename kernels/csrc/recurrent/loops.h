// Pieces of the recurrences of all kinds. Internal linkage: see numeric.h.
#pragma once

#include <algorithm>

#include "recurrent/kernels.h"
#include "recurrent/vectors.h"
#include "runtime/threads.h"

namespace octavo {
namespace {

constexpr int kGroup = 16;  // rows of a state that are walked together: their values stay in the first cache

// body(piece, part) for every piece of every segment in order and `parts` parts of a state, in parallel over
// segments and parts.
template <class Body>
inline void for_pieces(const StateStep& step, int parts, Body body) {
  const Plan plan = plan_pieces(step);
  parallel_for(step.num_segments * parts, [&](int item) {
    const int segment = item / parts, part = item % parts;
    for (int i = plan.first[segment]; i < plan.first[segment + 1]; ++i) body(plan.pieces[i], part);
  });
}

// Into how many parts a head's rows are cut, in groups, so that every thread has work. A part prepares the
// tokens for itself: never more parts than that.
inline int parts_of_head(int num_segments, int heads, int rows) {
  const int items = num_segments * heads, groups = (rows + kGroup - 1) / kGroup;
  const int wanted = items > 0 ? (num_threads() + items - 1) / items : 1;
  return std::min(wanted, groups);
}

// Rows [first, last) of part `part`: whole groups.
struct RowRange {
  int first, last;
};

inline RowRange rows_of_part(int rows, int parts, int part) {
  const int groups = (rows + kGroup - 1) / kGroup;
  return {groups * part / parts * kGroup, std::min(rows, groups * (part + 1) / parts * kGroup)};
}

// Asks for a group's rows of the state while the one before it is computed: one core waits for memory otherwise.
inline void prefetch_rows(const float* state, int64_t floats) {
  for (int64_t i = 0; i < floats; i += 16) __builtin_prefetch(state + i, 1, 3);
}

inline const void* row_of(const Rows& rows, int64_t row, int64_t offset) {
  return static_cast<const char*>(rows.data) + (row * rows.stride + offset) * float_size(rows.type);
}

inline void load_row(const Rows& rows, int64_t row, int64_t offset, int count, float* out) {
  load_floats(rows.data, rows.type, row * rows.stride + offset, count, out);
}

inline float load_one(const Rows& rows, int64_t row, int64_t offset) {
  float value;
  load_row(rows, row, offset, 1, &value);
  return value;
}

}  // namespace
}  // namespace octavo
