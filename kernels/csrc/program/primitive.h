// Common parts of Octavo's MLX primitives: a CPU stream, outputs with memory, contiguous inputs.
#pragma once

#include <concepts>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "program/encoder.h"
#include "runtime/numeric.h"

namespace octavo {

namespace mx = mlx::core;

inline mx::Stream cpu_stream(mx::StreamOrDevice stream) { return mx::to_stream(stream, mx::Device::cpu); }

// Returns a text such as "[2, 3]".
std::string shape_text(const mx::Shape& shape);
inline std::string shape_text(const mx::array& a) { return shape_text(a.shape()); }

// Throw std::invalid_argument (ValueError in Python) unless `holds`. A text from `message()` is built only on
// failure, for checks that run for every layer of every step.
inline void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}
template <std::invocable Message>
inline void require(bool holds, Message message) {
  if (!holds) throw std::invalid_argument(message());
}

inline bool is_float(mx::Dtype type) {
  return type == mx::bfloat16 || type == mx::float16 || type == mx::float32;
}

inline Float float_of(mx::Dtype type) {
  return type == mx::bfloat16 ? Float::bf16 : type == mx::float16 ? Float::f16 : Float::f32;
}

std::string dtype_text(mx::Dtype type);

// Returns a text such as "float32 [2, 3]".
std::string array_text(const mx::array& a);

// Throws std::invalid_argument unless x has floats and `right` is true; `shape`: the expected shape, as text.
void require_floats(const char* name, const mx::array& x, bool right, const std::string& shape);
void require_integers(const char* name, const mx::array& x);

// Copies the elements, of `size` bytes each, of a strided array in row-major order. (libmlx has this as
// copy_cpu, but does not export it.)
void copy_strided(const char* source, const mx::Shape& shape, const mx::Strides& strides, std::size_t size,
                  char* target);

// Returns `input` if it is row-contiguous, else a copy, which the stream makes when it gets there.
mx::array row_contiguous(const mx::array& input, Encoder& encoder);

// Converts ids of any integer type to int32. 64-bit ids that do not fit are clamped to the nearest int32,
// which no table has; wrapped, they could select a wrong row.
mx::array narrow_ids(const mx::array& ids, mx::StreamOrDevice stream);

// A primitive that runs only on the CPU and has neither gradients nor vmap.
class CpuPrimitive : public mx::Primitive {
 public:
  using Primitive::Primitive;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string(name()) + " runs on the CPU only");
  }

  // Whether row i of each output depends only on row i of the inputs with as many rows (first axis) and axes.
  // If so, the primitive must also work with other numbers of rows. `x`: one of the outputs.
  virtual bool computes_rows(const mx::array& /*x*/) const { return false; }
};

}  // namespace octavo
