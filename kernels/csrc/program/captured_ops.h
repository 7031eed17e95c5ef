// Operations of MLX in a program.
#pragma once

#include "program/encoder.h"

namespace octavo {

// Evaluates x, a pending result of MLX's own: as a view of its input where the operation is one, by work of
// ours where it is simple arithmetic, else by MLX in each run.
void capture_mlx(mx::array& x);

}  // namespace octavo
