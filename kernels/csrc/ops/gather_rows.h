// Rows of an array by their indices.
#pragma once

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// Returns x[ids] for x [N, ...] with elements of 2 or 4 bytes and integers ids [...]; throws
// std::invalid_argument for other types.
mx::array select_rows(const mx::array& x, const mx::array& ids, mx::StreamOrDevice stream);

// Returns x[ids], where x may be the end of an unevaluated graph. Then the row operations (linear layers,
// norms, gates, sums) after the last operation that mixes rows compute only these rows. A model uses it for
// the sampled rows, after the attention of its last layer.
mx::array compute_rows(const mx::array& x, const mx::array& ids, mx::StreamOrDevice stream);

}  // namespace octavo
