// Rows of an array by their indices.
#pragma once

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// Returns x[ids] for x [N, ...] of 2 or 4 bytes each and integers ids [...]; std::invalid_argument for other
// types.
mx::array select_rows(const mx::array& x, const mx::array& ids, mx::StreamOrDevice stream);

// Returns x[ids], where x may be the end of a graph that is not evaluated. The row operations (linear layers,
// norms, gates, sums) after the last one that mixes rows then compute only these rows. Behind the attention
// of a model's last layer these are the sampled rows.
mx::array compute_rows(const mx::array& x, const mx::array& ids, mx::StreamOrDevice stream);

}  // namespace octavo
