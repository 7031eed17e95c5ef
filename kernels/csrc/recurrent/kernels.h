// Kernels of recurrences over state slots, declared for each instruction set.
//
// Every kernel processes the tokens of a segment one by one, some rows of a state at a time. Each token
// applies a fixed sequence of operations to a row. So results depend only on the instruction set and on
// earlier tokens, and are bit-identical for any chunks, other segments and threads.
#pragma once

#include "recurrent/segments.h"
#include "runtime/numeric.h"

namespace octavo {

// Input rows; the values of a row are adjacent.
struct Rows {
  const void* data;
  int64_t stride;  // distance between rows, in values
  Float type;
};

enum class Gates {
  ready,     // a is the decay itself, b is beta
  softplus,  // decay exp(-exp(A_log) softplus(a + dt_bias)), beta sigmoid(b) beta_scale
  bounded,   // decay exp(lower_bound sigmoid(exp(A_log) (a + dt_bias))), beta as for softplus
};

// S = S diag(g);  u = beta (v - S k);  S += u k';  y = S q   (gated delta rule, Yang et al. 2024)
struct DeltaCall {
  float* pool;  // [num_slots, Hv, Dv, Dk]
  StateStep step;
  Rows q, k;             // [T, Hk, Dk]
  Rows v;                // [T, Hv, Dv]
  Rows a;                // [T, Hv], or [T, Hv, Dk] with vector_gate
  Rows b;                // [T, Hv]
  const float* A_log;    // [Hv], or [Hv, Dk] with wide_A; unused with `ready` gates
  const float* dt_bias;  // like a row of a
  Gates gates;
  float lower_bound, beta_scale;
  bool vector_gate, wide_A;
  int Hk, Hv, Dk, Dv;
  void* y;  // [T, Hv, Dv], of the type of v
};

// y[t] = f(bias + sum over j of weight[j] x[t - K + 1 + j]) for each channel, where f is identity or silu.
struct ConvCall {
  void* pool;  // [num_slots, K - 1, C] of pool_type: the last inputs, oldest first
  StateStep step;
  Float pool_type;
  Rows x;              // [T, C]
  const void* weight;  // [K, C]
  const void* bias;    // [C] or null
  Float weight_type, bias_type;
  int channels, taps;
  bool silu;
  void* y;  // [T, C] of the type of x
};

// S = S exp(-exp(A_log) d) + (d x) B';  y = S C + D x, d = clip(softplus(dt + dt_bias))   (SSD, Dao and Gu
// 2024)
struct SsdCall {
  float* pool;  // [num_slots, H, Dh, Ds]
  StateStep step;
  Rows x;                        // [T, H, Dh]
  Rows B, C;                     // [T, G, Ds]
  Rows dt;                       // [T, H]
  const float *A_log, *dt_bias;  // [H]
  const float* D;                // [H]
  float lowest, highest;         // limits of d
  int H, G, Dh, Ds;
  void* y;  // [T, H, Dh] of the type of x
};

// S = exp(log_decay) S + k v';  y = scale S' q   (lightning attention, Qin et al. 2024)
struct LightningCall {
  float* pool;  // [num_slots, H, Dk, Dv]
  StateStep step;
  Rows q, k;               // [T, H, Dk]
  Rows v;                  // [T, H, Dv]
  const float* log_decay;  // [H]
  float scale;
  int H, Dk, Dv;
  void* y;  // [T, H, Dv] of the type of v
};

// S[c] = S[c] exp(d[c] A[c]) + d[c] x[c] B;  y[c] = S[c] . C + D[c] x[c] for each channel c   (Mamba, Gu and
// Dao 2023)
struct ScanCall {
  float* pool;  // [num_slots, W, Ds]
  StateStep step;
  Rows x, d;           // [T, W]
  Rows B, C;           // [T, Ds]
  const float *A, *D;  // [W, Ds] and [W]
  int W, Ds;
  void* y;  // [T, W] of the type of x
};

// h = a h + m x sigmoid(input_gate) with a = exp(c sigmoid(a_gate)) and m = sqrt(1 - a^2), or m = 1 for the
// first token of a sequence   (RG-LRU, De et al. 2024)
struct LruCall {
  float* pool;  // [num_slots, W]
  StateStep step;
  Rows x, input_gate, a_gate;  // [T, W]
  const float* c;              // [W]: -8 softplus of the layer's parameter
  int W;
  void* y;  // [T, W] of the type of x
};

// S = S diag(w) + (S a) b' + v k';  y = S r   (RWKV-7, Peng et al. 2025)
struct WkvCall {
  float* pool;  // [num_slots, H, D, D]
  StateStep step;
  Rows r, w, k, v, a, b;  // [T, H, D]
  int H, D;
  void* y;  // [T, H, D] of the type of r
};

#define OCTAVO_DECLARE_RECURRENT(isa)        \
  namespace isa {                            \
  void gated_delta(const DeltaCall& call);   \
  void causal_conv(const ConvCall& call);    \
  void ssd(const SsdCall& call);             \
  void lightning(const LightningCall& call); \
  void selective_scan(const ScanCall& call); \
  void rg_lru(const LruCall& call);          \
  void wkv7(const WkvCall& call);            \
  }
OCTAVO_DECLARE_RECURRENT(generic)
OCTAVO_DECLARE_RECURRENT(avx2)
OCTAVO_DECLARE_RECURRENT(avx512)
#undef OCTAVO_DECLARE_RECURRENT

}  // namespace octavo
