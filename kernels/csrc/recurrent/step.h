// Arrays that describe a step of recurrent layers, as inputs of graph nodes.
#pragma once

#include <string>
#include <vector>

#include "program/primitive.h"
#include "recurrent/segments.h"

namespace octavo {

// int32 arrays that assign rows to states: see StateStep.
struct StepArrays {
  mx::array segments;     // [S, 4]
  mx::array checkpoints;  // [C, 2]

  // Throws std::invalid_argument unless the arrays have these shapes.
  void check() const {
    const auto ints = [](const char* name, const mx::array& x, const char* axes, int columns) {
      require(x.dtype() == mx::int32 && x.ndim() == 2 && x.shape(1) == columns,
              std::string(name) + " must be int32 " + axes + ", got " + array_text(x));
    };
    ints("segments", segments, "[S, 4]", 4);
    ints("checkpoints", checkpoints, "[C, 2]", 2);
  }
};

// Makes a node's step, with `rows` rows and `slots` slots, from its inputs 1 and 2: segments, checkpoints.
inline StateStep step_of(const std::vector<mx::array>& inputs, int rows, int slots, Encoder& encoder) {
  const mx::array segments = row_contiguous(inputs[1], encoder);
  const mx::array checkpoints = row_contiguous(inputs[2], encoder);
  return {segments.data<int32_t>(),
          checkpoints.data<int32_t>(),
          segments.shape(0),
          checkpoints.shape(0),
          rows,
          slots};
}

}  // namespace octavo
