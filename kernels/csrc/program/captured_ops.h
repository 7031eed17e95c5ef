// MLX's own operations in a captured program.
#pragma once

#include "program/encoder.h"

namespace octavo {

// Captures x, a pending result of MLX's own operations: as a view of its input if possible, as a task of
// Octavo for simple arithmetic, otherwise as an evaluation by MLX in each run.
void capture_mlx(mx::array& x);

}  // namespace octavo
