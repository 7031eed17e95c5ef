// Rows of an array by their indices.
#pragma once

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// x[ids] for x [N, ...] of 2 or 4 bytes each and integers ids [...]. Wrong types are std::invalid_argument.
mx::array select_rows(const mx::array& x, const mx::array& ids, mx::StreamOrDevice stream);

}  // namespace octavo
