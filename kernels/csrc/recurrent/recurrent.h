// Recurrences over pools of state slots as MLX graph nodes. Wrong shapes and types are std::invalid_argument.
//
// A pool [num_slots, ...] is written in place: each node returns a new handle to the same memory, and the old one
// must not be used again. One node advances a state once each time it is evaluated.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

using MaybeArray = std::optional<mx::array>;
using PoolAndRows = std::pair<mx::array, mx::array>;

// Which rows continue which states, int32: see StateStep.
struct StepArrays {
  mx::array segments;     // [S, 4]
  mx::array checkpoints;  // [C, 2]
};

// How a decay and beta come from a and b: "ready", "softplus" or "bounded", see Gates.
struct DeltaGates {
  std::string kind;
  MaybeArray A_log;    // [Hv] or [Hv, Dk]
  MaybeArray dt_bias;  // like a row of a
  float lower_bound, beta_scale;
};

// pool float32 [N, Hv, Dv, Dk]; q, k [T, Hk, Dk]; v [T, Hv, Dv]; a [T, Hv] or [T, Hv, Dk]; b [T, Hv]. Dk is a
// multiple of 16, at most 256. Returns the pool and y [T, Hv, Dv] of v's type.
PoolAndRows gated_delta(const mx::array& pool, const StepArrays& step, const mx::array& q, const mx::array& k,
                        const mx::array& v, const mx::array& a, const mx::array& b, const DeltaGates& gates,
                        mx::StreamOrDevice stream);

// pool [N, K - 1, C]; x [T, C]; weight [K, C]; bias [C]. Returns the pool and y [T, C] of x's type.
PoolAndRows causal_conv(const mx::array& pool, const StepArrays& step, const mx::array& x, const mx::array& weight,
                        const MaybeArray& bias, bool silu, mx::StreamOrDevice stream);

}  // namespace octavo
