// Selection of an array's rows by their indices.
#pragma once

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// Returns x[ids] for x [N, ...] with elements of 2 or 4 bytes and integers ids [...]; throws
// std::invalid_argument for other types.
mx::array select_rows(const mx::array& x, const mx::array& ids, mx::StreamOrDevice stream);

// Returns x[ids]. If x is unevaluated, only these rows are computed after the last operation that mixes rows
// (by linear layers, norms, gates and sums). Models use it after the attention of their last layer, for the
// rows that are sampled.
mx::array compute_rows(const mx::array& x, const mx::array& ids, mx::StreamOrDevice stream);

}  // namespace octavo
