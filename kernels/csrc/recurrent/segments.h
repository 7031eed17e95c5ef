// Assignment of a step's rows to states.
#pragma once

#include <cstdint>
#include <vector>

namespace octavo {

// One step of a recurrent layer, as int32 arrays that a captured program may fill again.
struct StateStep {
  const int32_t*
      segments;  // [num_segments, 4]: first row, rows, slot that is read (-1: none yet), slot written
  const int32_t* checkpoints;  // [num_checkpoints, 2]: row, slot that gets the state after it; row -1: none
  int num_segments, num_checkpoints;
  int num_rows, num_slots;
};

// Rows of one segment without a checkpoint between them. They advance the state of slot `source` (-1: zeros)
// to slot `target`.
struct Piece {
  int start, length, source, target;
};

// Pieces of all segments; those of segment i are [first[i], first[i + 1]), each reading the result of the
// previous one. A piece without rows is a copy. A segment without rows has no pieces.
struct Plan {
  std::vector<Piece> pieces;
  std::vector<int> first;
};

// Throws std::invalid_argument for a row or slot outside the step.
Plan plan_pieces(const StateStep& step);

}  // namespace octavo
