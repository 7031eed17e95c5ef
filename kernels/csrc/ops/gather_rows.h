// Rows of an array by their indices.
#pragma once

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// x[ids] for x [N, ...] of 2 or 4 bytes each and integers ids [...]. Wrong types are std::invalid_argument.
mx::array select_rows(const mx::array& x, const mx::array& ids, mx::StreamOrDevice stream);

// The same, where x may be the end of a graph that nobody has evaluated: of its operations on rows (linear
// layers, norms, gates, sums) those after the last that mixes rows compute only the ones asked for. After the
// attention of a model's last layer these are the rows that tokens are drawn from.
mx::array compute_rows(const mx::array& x, const mx::array& ids, mx::StreamOrDevice stream);

}  // namespace octavo
