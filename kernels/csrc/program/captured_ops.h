// Capture of MLX's own operations in a program.
#pragma once

#include "program/encoder.h"

namespace octavo {

// Captures x, an unevaluated result of MLX's own operations: as a view of its input if possible, as a task of
// Octavo if it is simple arithmetic, else as an evaluation by MLX in each run.
void capture_mlx(mx::array& x);

}  // namespace octavo
