#include "ops/ops.h"

#include <type_traits>

#include "ops/row_loops.h"
#include "runtime/exp_float.h"
#include "runtime/row_items.h"
#include "runtime/vectors.h"

namespace octavo::OCTAVO_ISA {
namespace {

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_float(-x)); }

// Returns 1 + erf(x / sqrt(2)), Abramowitz and Stegun 7.1.26, with an absolute error below 5e-7.
inline float one_plus_erf(float x) {
  const float z = (x < 0.0f ? -x : x) * 0.70710678118654752f;
  const float t = 1.0f / (1.0f + 0.3275911f * z);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float tail = p * t * exp_float(-z * z);  // 1 - erf(z)
  return x < 0.0f ? tail : 2.0f - tail;
}

template <Activation kind>
inline float activate(float x) {
  if constexpr (kind == Activation::silu) return x * sigmoid(x);
  if constexpr (kind == Activation::gelu) return 0.5f * x * one_plus_erf(x);
  if constexpr (kind == Activation::gelu_sigmoid) return x * sigmoid(1.702f * x);
  // (1 + tanh(u)) / 2 = sigmoid(2 u)
  return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

// Calls body(row) for every row; items have enough rows to be worth waking a thread.
template <class Body>
void for_rows(int64_t rows, std::size_t row_bytes, Body body) {
  const int64_t per_item = static_cast<int64_t>(kItemBytes / (row_bytes + 1)) + 1;
  for_row_items(rows, per_item, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) body(row);
  });
}

#if defined(__AVX512BF16__)
// Returns silu with fused operations, which take two thirds of the time of the portable code.
inline Vec silu_lanes(Vec x) { return x / (1.0f + exp_lanes(-x)); }
#endif

// Replaces values by their activations; the array has space for whole vectors.
template <Activation kind>
void activate_floats(float* values, int count) {
#if defined(__AVX512BF16__)
  if constexpr (kind == Activation::silu) {
    for (int i = count; i % kLanes != 0; ++i) values[i] = 0;
    for (int i = 0; i < count; i += kLanes) store(values + i, silu_lanes(load(values + i)));
    return;
  }
#endif
  for (int i = 0; i < count; ++i) values[i] = activate<kind>(values[i]);
}

// Computes activation(gate) * up for a row or a piece of a row.
template <Activation kind>
void gate_row(const GateCall& call, const void* gate, const void* up, void* y, int size) {
  float values[kBlock], ups[kBlock];
  for (int at = 0; at < size; at += kBlock) {
    const int n = size - at < kBlock ? size - at : kBlock;
    load_floats(gate, call.type, at, n, values);
    activate_floats<kind>(values, n);
    if (up != nullptr) {
      load_floats(up, call.type, at, n, ups);
      for (int i = 0; i < n; ++i) values[i] *= ups[i];
    }
    store_floats(y, call.type, at, n, values);
  }
}

// Computes the gate for values [at, at + size) of a row.
template <Activation kind>
void gate_piece(const GateCall& call, int64_t row, int at, int size) {
  const std::size_t width = float_size(call.type);
  const auto place = [&](const void* data, int64_t stride) {
    return static_cast<const char*>(data) + (row * stride + at) * width;
  };
  const void* const up = call.up.data == nullptr ? nullptr : place(call.up.data, call.up.stride);
  void* const y = const_cast<char*>(place(call.y, call.y_stride));
  gate_row<kind>(call, place(call.gate.data, call.gate.stride), up, y, size);
}

template <Activation kind>
void gate_rows(const GateCall& call) {
  // Values per piece of a long row: pieces let several threads share the row of a single decoding sequence.
  constexpr int kPiece = kItemBytes / 4;
  const std::size_t width = float_size(call.type);
  const int pieces = (call.size + kPiece - 1) / kPiece;
  for_rows(call.rows * pieces, width * (call.size < kPiece ? call.size : kPiece), [&](int64_t item) {
    const int64_t row = item / pieces;
    const int at = static_cast<int>(item % pieces) * kPiece;
    gate_piece<kind>(call, row, at, call.size - at < kPiece ? call.size - at : kPiece);
  });
}

// Calls body(integral constant) with the given activation.
template <class Body>
void with_activation(Activation activation, Body body) {
  switch (activation) {
    case Activation::silu: return body(std::integral_constant<Activation, Activation::silu>());
    case Activation::gelu: return body(std::integral_constant<Activation, Activation::gelu>());
    case Activation::gelu_tanh: return body(std::integral_constant<Activation, Activation::gelu_tanh>());
    case Activation::gelu_sigmoid:
      return body(std::integral_constant<Activation, Activation::gelu_sigmoid>());
  }
}

// Stores x + added of one row in `sum` and returns the sum; without `added`, returns x.
const void* add_row(const NormCall& call, std::size_t start) {
  if (call.added == nullptr) return call.x;
  float values[kBlock], others[kBlock];
  for (int at = 0; at < call.size; at += kBlock) {
    const int n = call.size - at < kBlock ? call.size - at : kBlock;
    load_floats(call.x, call.type, start + at, n, values);
    load_floats(call.added, call.type, start + at, n, others);
    for (int i = 0; i < n; ++i) values[i] += others[i];
    store_floats(call.sum, call.type, start + at, n, values);
  }
  return call.sum;
}

}  // namespace

void norm(const NormCall& call) {
  for_rows(call.rows, float_size(call.type) * call.size, [&](int64_t row) {
    const std::size_t start = row * call.size;
    const void* const x = add_row(call, start);
    const float size = static_cast<float>(call.size);
    float mean = 0;
    if (call.centered)
      mean = sum_row(x, call.type, start, call.size, [](float value) { return value; }) / size;
    const float squares = sum_row(x, call.type, start, call.size,
                                  [mean](float value) { return (value - mean) * (value - mean); });
    const float factor = 1.0f / __builtin_sqrtf(squares / size + call.eps);
    float values[kBlock], others[kBlock];
    for (int at = 0; at < call.size; at += kBlock) {
      const int n = call.size - at < kBlock ? call.size - at : kBlock;
      load_floats(x, call.type, start + at, n, values);
      for (int i = 0; i < n; ++i) values[i] = (values[i] - mean) * factor;
      if (call.weight != nullptr) {
        load_floats(call.weight, call.weight_type, at, n, others);
        for (int i = 0; i < n; ++i) values[i] *= others[i];
      }
      if (call.bias != nullptr) {
        load_floats(call.bias, call.bias_type, at, n, others);
        for (int i = 0; i < n; ++i) values[i] += others[i];
      }
      store_floats(call.y, call.type, start + at, n, values);
    }
  });
}

void gated(const GateCall& call) {
  with_activation(call.activation, [&](auto kind) { gate_rows<kind>(call); });
}

void gated_here(const GateCall& call) {
  with_activation(call.activation, [&](auto kind) {
    for (int64_t row = 0; row < call.rows; ++row) gate_piece<kind>(call, row, 0, call.size);
  });
}

}  // namespace octavo::OCTAVO_ISA
