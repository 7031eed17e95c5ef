// Operations of MLX that a program can carry out in its place.
#pragma once

#include "encoder.h"

namespace octavo {

// Evaluates x, a pending result of MLX's own: as a view of its input where the operation is one, by work of
// ours where it is simple arithmetic. std::invalid_argument names an operation that is neither.
void record_mlx(mx::array& x);

}  // namespace octavo
