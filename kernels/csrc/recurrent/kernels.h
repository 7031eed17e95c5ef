// Recurrences over slots of states, declared once per instruction set.
//
// Every kernel walks the tokens of a segment one by one, some rows of a state at a time. What a token does to a
// row is one fixed sequence of operations, so bits depend on the instruction level and on the tokens before,
// and on nothing else: not on cuts, not on other segments, not on threads.
#pragma once

#include "recurrent/segments.h"
#include "runtime/numeric.h"

namespace octavo {

// Values [row, i] of an input, i without gaps.
struct Rows {
  const void* data;
  int64_t stride;  // values from one row to the next
  Float type;
};

enum class Gates {
  ready,     // a is the decay and b is beta
  softplus,  // decay exp(-exp(A_log) softplus(a + dt_bias)), beta sigmoid(b) beta_scale
  bounded,   // decay exp(lower_bound sigmoid(exp(A_log) (a + dt_bias))), beta likewise
};

// S = S diag(g);  u = beta (v - S k);  S += u k';  y = S q   (gated delta rule, Yang et al. 2024)
struct DeltaCall {
  float* pool;  // [num_slots, Hv, Dv, Dk]
  StateStep step;
  Rows q, k;           // [T, Hk, Dk]
  Rows v;              // [T, Hv, Dv]
  Rows a;              // [T, Hv], or [T, Hv, Dk] with vector_gate
  Rows b;              // [T, Hv]
  const float* A_log;  // [Hv], or [Hv, Dk] with wide_A; of gates that are not ready
  const float* dt_bias;  // like a row of a
  Gates gates;
  float lower_bound, beta_scale;
  bool vector_gate, wide_A;
  int Hk, Hv, Dk, Dv;
  void* y;  // [T, Hv, Dv] of the type of v
};

// y[t] = f(bias + sum over j of weight[j] x[t - K + 1 + j]) for each channel, f the identity or x sigmoid(x).
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

#define OCTAVO_DECLARE_RECURRENT(isa)        \
  namespace isa {                            \
  void gated_delta(const DeltaCall& call);   \
  void causal_conv(const ConvCall& call);    \
  }
OCTAVO_DECLARE_RECURRENT(generic)
OCTAVO_DECLARE_RECURRENT(avx2)
OCTAVO_DECLARE_RECURRENT(avx512)
#undef OCTAVO_DECLARE_RECURRENT

}  // namespace octavo
