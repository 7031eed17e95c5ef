// Norms that nobody has computed yet, for nodes that take them over.
#pragma once

#include <optional>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

struct PendingNorm {
  mx::array x, weight;
  float eps;
};

// `x` as an RMS norm with a weight, not yet evaluated.
std::optional<PendingNorm> pending_rms_norm(const mx::array& x);

}  // namespace octavo
