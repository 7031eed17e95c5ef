// Assignment of a step's rows to state slots.
#pragma once

#include <cstdint>
#include <vector>

namespace octavo {

// Segments and checkpoints of one step, as int32 arrays that may get new values for a captured program.
struct StateStep {
  const int32_t*
      segments;  // [num_segments, 4]: first row, number of rows, slot to read (-1: none yet), slot to write
  const int32_t* checkpoints;  // [num_checkpoints, 2]: row (-1: none), slot that gets the state after it
  int num_segments, num_checkpoints;
  int num_rows, num_slots;
};

// Rows of a segment between two checkpoints. They advance the state from slot `source` (-1: zeros) to slot
// `target`.
struct Piece {
  int start, length, source, target;
};

// The pieces of all segments: pieces first[i] to first[i + 1] - 1 belong to segment i, and each continues
// from the one before. A piece without rows copies a state. A segment without rows has no pieces.
struct Plan {
  std::vector<Piece> pieces;
  std::vector<int> first;
};

// Throws std::invalid_argument for a row or slot outside the step.
Plan plan_pieces(const StateStep& step);

}  // namespace octavo
