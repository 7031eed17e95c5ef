// The small operations as MLX graph nodes. Wrong shapes and types are std::invalid_argument.
#pragma once

#include <optional>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// x / sqrt(mean(x^2) + eps) * weight over the last axis, in x's type; float32 inside, one rounding.
mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps,
                   mx::StreamOrDevice stream);

// silu(gate) * up; float32 inside, one rounding.
mx::array swiglu(const mx::array& gate, const mx::array& up, mx::StreamOrDevice stream);

}  // namespace octavo
