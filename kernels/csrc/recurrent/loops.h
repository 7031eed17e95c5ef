// Common parts of all recurrences. Internal linkage: see numeric.h.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "recurrent/kernels.h"
#include "recurrent/vectors.h"
#include "runtime/threads.h"

namespace octavo {
namespace {

constexpr int kGroup = 16;  // rows of a state processed together, whose values stay in L1
constexpr int kTile = 4;    // rows of a group for which a token's vectors are loaded once

// Calls body(piece, part) for every piece of every segment and for each of `parts` parts of a state. Segments
// and parts run in parallel; pieces of a segment run in order.
template <class Body>
inline void for_pieces(const StateStep& step, int parts, Body body) {
  const Plan plan = plan_pieces(step);
  parallel_for(step.num_segments * parts, [&](int item) {
    const int segment = item / parts, part = item % parts;
    for (int i = plan.first[segment]; i < plan.first[segment + 1]; ++i) body(plan.pieces[i], part);
  });
}

// Returns into how many parts a head's groups of rows are divided, to give every thread work. More parts
// would be slower, because each part prepares the tokens again.
inline int parts_of_head(int num_segments, int heads, int rows) {
  const int items = num_segments * heads, groups = (rows + kGroup - 1) / kGroup;
  const int wanted = items > 0 ? (num_threads() + items - 1) / items : 1;
  return std::min(wanted, groups);
}

// The rows [first, last) of a part, in whole groups.
struct RowRange {
  int first, last;
};

inline RowRange rows_of_part(int rows, int parts, int part) {
  const int groups = (rows + kGroup - 1) / kGroup;
  return {groups * part / parts * kGroup, std::min(rows, groups * (part + 1) / parts * kGroup)};
}

// Prefetches `floats` values of the state, kAhead bytes after `state`, into L2, because in L1 they would
// evict the rows in use. Past the end of this head's state, it prefetches the next head's.
template <int floats>
inline void prefetch(const float* state) {
  constexpr int kAhead = 24576;  // bytes
  for (int i = 0; i < floats; i += 16)
    __builtin_prefetch(reinterpret_cast<const char*>(state + i) + kAhead, 0, 2);
}

inline void load_row(const Rows& rows, int64_t row, int64_t offset, int count, float* out) {
  load_floats(rows.data, rows.type, row * rows.stride + offset, count, out);
}

inline float load_one(const Rows& rows, int64_t row, int64_t offset) {
  float value;
  load_row(rows, row, offset, 1, &value);
  return value;
}

// Calls tile(integral constant of rows, first row) until `rows` rows are done.
template <class Tile>
inline void for_tiles(int rows, Tile tile) {
  int row = 0;
  for (; row + kTile <= rows; row += kTile) tile(std::integral_constant<int, kTile>(), row);
  for (; row < rows; ++row) tile(std::integral_constant<int, 1>(), row);
}

// Stores the sums of up to four rows in their group's array.
inline void store_sums(const Vec* rows, float* to) {
  *reinterpret_cast<Four*>(to) = sums(rows[0], rows[1], rows[2], rows[3]);
}

// Some or all rows of one head's state: where to read them (source slot) and write them (target slot).
struct HeadRows {
  const float* source;
  float* target;

  // If the sequence has no state yet, clears the target rows and reads them.
  HeadRows(float* pool, const Piece& piece, int64_t slot_size, int64_t first, int64_t count)
      : source(pool + piece.target * slot_size + first), target(pool + piece.target * slot_size + first) {
    if (piece.source < 0) std::memset(target, 0, sizeof(float) * count);
    else source = pool + piece.source * slot_size + first;
    if (piece.length == 0 && source != target) std::memcpy(target, source, sizeof(float) * count);
  }
};

}  // namespace
}  // namespace octavo
