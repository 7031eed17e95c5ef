// Row and elementwise operations as MLX graph nodes. Wrong shapes and types are std::invalid_argument.
//
// All compute in float32 and round once to the type of their input. `fuse` lets a node take over
// unevaluated nodes before it (ops/views.h); it then rounds wherever they would have, so that results are
// the same to the bit.
#pragma once

#include <optional>
#include <string>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

using MaybeArray = std::optional<mx::array>;

// x / sqrt(mean(x^2) + eps) * weight over the last axis. With `fuse`, if x is a sum that is not
// evaluated yet, one node computes both, and `x` becomes that node's sum.
mx::array rms_norm(mx::array& x, const MaybeArray& weight, float eps, bool fuse, mx::StreamOrDevice stream);

// (x - mean) / sqrt(variance + eps) * weight + bias over the last axis; `fuse` as for rms_norm.
mx::array layer_norm(mx::array& x, const MaybeArray& weight, const MaybeArray& bias, float eps, bool fuse,
                     mx::StreamOrDevice stream);

// activation(gate) * up, or activation(gate); "silu", "gelu", "gelu_tanh" or "gelu_sigmoid".
mx::array gated(const mx::array& gate, const MaybeArray& up, const std::string& activation,
                mx::StreamOrDevice stream);

struct RopeOptions {
  int dims;              // of the last axis, from the front; the rest stays as it is
  bool interleaved;      // pairs are neighbours; otherwise dims / 2 apart
  float position_scale;  // positions are multiplied by it
  float value_scale;     // the rotated values are multiplied by it first
};

// Rotary embedding (Su et al. 2021) of x [B, H, L, D] or [B, L, D]: the token l of b has position
// offset[b] + l (offset [B], or one for all), pair i turns by position * inverse_frequencies[i].
// With `fuse`, an RMS norm over D that is not evaluated yet is computed on the way.
mx::array rope(const mx::array& x, const mx::array& offset, const mx::array& inverse_frequencies,
               const RopeOptions& options, bool fuse, mx::StreamOrDevice stream);

}  // namespace octavo
