// Row and elementwise operations as MLX graph nodes, which throw std::invalid_argument for wrong inputs.
//
// Operations compute in float32 and round once to the type of their input. With `fuse`, a node also computes
// unevaluated nodes before it (ops/views.h) and rounds where those nodes would, so results are bit-identical.
#pragma once

#include <optional>
#include <string>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

using MaybeArray = std::optional<mx::array>;

// Returns x / sqrt(mean(x^2) + eps) * weight over the last axis. With `fuse`, if x is an unevaluated sum, one
// node computes sum and norm, and `x` becomes that node's sum.
mx::array rms_norm(mx::array& x, const MaybeArray& weight, float eps, bool fuse, mx::StreamOrDevice stream);

// Returns (x - mean) / sqrt(variance + eps) * weight + bias over the last axis; `fuse` as in rms_norm.
mx::array layer_norm(mx::array& x, const MaybeArray& weight, const MaybeArray& bias, float eps, bool fuse,
                     mx::StreamOrDevice stream);

// Returns activation(gate) * up, or activation(gate) without `up`; activations are "silu", "gelu",
// "gelu_tanh" and "gelu_sigmoid".
mx::array gated(const mx::array& gate, const MaybeArray& up, const std::string& activation,
                mx::StreamOrDevice stream);

struct RopeOptions {
  int dims;              // number of rotated values at the front of the last axis
  bool interleaved;      // the two values of a pair are neighbours; else dims / 2 apart
  float position_scale;  // factor on positions
  float value_scale;     // factor on the values, applied before the rotation
};

// Rotary embedding (Su et al. 2021) of x [B, H, L, D] or [B, L, D]: token l of b has position offset[b] + l
// (offset [B], or one for all), and pair i rotates by position * inverse_frequencies[i].
mx::array rope(const mx::array& x, const mx::array& offset, const mx::array& inverse_frequencies,
               const RopeOptions& options, mx::StreamOrDevice stream);

}  // namespace octavo
