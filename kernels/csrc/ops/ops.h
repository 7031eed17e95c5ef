// Row and elementwise operations, declared for each instruction set.
#pragma once

#include "runtime/numeric.h"

namespace octavo {

struct NormCall {
  const void* x;      // [rows, size]
  const void* added;  // like x: the norm's input is x + added, rounded to `type` and stored in `sum`; or null
  void* sum;          // like x, or null
  const void* weight;  // [size], or null
  const void* bias;    // [size], or null
  void* y;             // like x
  Float type, weight_type, bias_type;
  int rows, size;
  float eps;
  bool centered;  // whether the mean is subtracted first (layer norm)
};

enum class Activation { silu, gelu, gelu_tanh, gelu_sigmoid };

// Rows of `size` values whose starts are `stride` values apart.
struct StridedRows {
  const void* data;
  int64_t stride;
};

struct GateCall {
  StridedRows gate, up;  // if `up` is null, y is the activation of the gate
  void* y;
  int64_t y_stride;  // distance between rows, in values; y may share memory with the gate or `up`
  Float type;
  Activation activation;
  int64_t rows;
  int size;
};

// Rotation of the first `dims` of each head's `size` values by the angles of its token.
struct RopeCall {
  const void* x;  // value [b, h, l, i] at b * strides[0] + h * strides[1] + l * strides[2] + i
  int64_t strides[3];
  int batch, heads, length, size;
  const float* angles;   // [batch or 1, length, 2, dims / 2]: cosines, then sines
  int64_t angle_stride;  // distance between batches, in values; 0 if they share angles
  Float type;
  int dims;
  bool interleaved;  // the two values of a pair are neighbours; else dims / 2 apart
  float scale;       // factor on the rotated values
  void* y;           // [batch, heads, length, size] without gaps
};

// The angles of a rotation: positions times inverse frequencies.
struct AngleCall {
  const int32_t* offsets;            // [batch]
  const float* inverse_frequencies;  // [half]
  float position_scale;
  int batch, length, half;
  float* y;  // [batch, length, 2, half]: cosines, then sines
};

#define OCTAVO_DECLARE_OPS(isa)            \
  namespace isa {                          \
  void norm(const NormCall& call);         \
  void gated(const GateCall& call);        \
  void gated_here(const GateCall& call);   \
  void rope(const RopeCall& call);         \
  void rope_angles(const AngleCall& call); \
  }
OCTAVO_DECLARE_OPS(generic)
OCTAVO_DECLARE_OPS(avx2)
OCTAVO_DECLARE_OPS(avx512)
#undef OCTAVO_DECLARE_OPS

// Computes `gated` on the calling thread only, for rows that a linear layer has just finished.
void run_gated_here(const GateCall& call);

}  // namespace octavo
