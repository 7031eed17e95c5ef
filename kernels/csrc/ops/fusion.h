// Norms that are not evaluated yet, for nodes that compute them, too.
#pragma once

#include <optional>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

struct PendingNorm {
  mx::array x, weight;
  float eps;
};

// Returns `x` as an RMS norm with a weight, if it is one that is not evaluated yet.
std::optional<PendingNorm> pending_rms_norm(const mx::array& x);

}  // namespace octavo
