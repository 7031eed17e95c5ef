// Recurrences over pools of state slots as MLX graph nodes. Wrong shapes and types are std::invalid_argument.
//
// A pool [num_slots, ...] is written in place: each node returns a new handle to the same memory, and the old
// one must not be used again. One node advances a state once each time it is evaluated.
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
PoolAndRows causal_conv(const mx::array& pool, const StepArrays& step, const mx::array& x,
                        const mx::array& weight, const MaybeArray& bias, bool silu,
                        mx::StreamOrDevice stream);

struct SsdParameters {
  mx::array A_log, dt_bias, D;  // [H]
  float lowest, highest;        // of softplus(dt + dt_bias)
};

// pool float32 [N, H, Dh, Ds]; x [T, H, Dh]; B, C [T, G, Ds]; dt [T, H]. Ds is a multiple of 16. Returns the
// pool and y [T, H, Dh] of x's type.
PoolAndRows ssd(const mx::array& pool, const StepArrays& step, const mx::array& x, const mx::array& B,
                const mx::array& C, const mx::array& dt, const SsdParameters& parameters,
                mx::StreamOrDevice stream);

// pool float32 [N, H, Dk, Dv]; q, k [T, H, Dk]; v [T, H, Dv]; log_decay [H]. Dk is even, Dv a multiple of 16.
// Returns the pool and y [T, H, Dv] of v's type.
PoolAndRows lightning(const mx::array& pool, const StepArrays& step, const mx::array& q, const mx::array& k,
                      const mx::array& v, const mx::array& log_decay, float scale, mx::StreamOrDevice stream);

// pool float32 [N, W, Ds]; x, d [T, W]; B, C [T, Ds]; A [W, Ds], negative; D [W]. Ds is a multiple of 16.
// Returns the pool and y [T, W] of x's type.
PoolAndRows selective_scan(const mx::array& pool, const StepArrays& step, const mx::array& x,
                           const mx::array& d, const mx::array& B, const mx::array& C, const mx::array& A,
                           const mx::array& D, mx::StreamOrDevice stream);

// pool float32 [N, W]; x, input_gate, a_gate [T, W] before the sigmoid; c [W]. Returns the pool and y [T, W]
// of x's type.
PoolAndRows rg_lru(const mx::array& pool, const StepArrays& step, const mx::array& x,
                   const mx::array& input_gate, const mx::array& a_gate, const mx::array& c,
                   mx::StreamOrDevice stream);

// pool float32 [N, H, D, D]; r, w, k, v, a, b [T, H, D]. D is a multiple of 16. Returns the pool and y [T, H,
// D] of r's type.
PoolAndRows wkv7(const mx::array& pool, const StepArrays& step, const mx::array& r, const mx::array& w,
                 const mx::array& k, const mx::array& v, const mx::array& a, const mx::array& b,
                 mx::StreamOrDevice stream);

// flags int32 [T], written in place: 1 for the last row of each segment and for rows of checkpoints if y [T, ..]
// holds NaN or infinity there, the others as they are. A state that does gives a y that does.
mx::array mark_nonfinite(const mx::array& flags, const StepArrays& step, const mx::array& y,
                         mx::StreamOrDevice stream);

}  // namespace octavo
