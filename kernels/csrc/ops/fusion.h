// Finds unevaluated norms, which a later graph node can compute together with its own work.
#pragma once

#include <optional>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

struct PendingNorm {
  mx::array x, weight;
  float eps;
};

// Returns the norm that gives `x`, if x is an unevaluated RMS norm with a weight.
std::optional<PendingNorm> pending_rms_norm(const mx::array& x);

}  // namespace octavo
