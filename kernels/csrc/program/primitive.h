// Common parts of Octavo's MLX primitives: a CPU stream, outputs with memory, contiguous inputs.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "program/encoder.h"
#include "runtime/numeric.h"

namespace octavo {

namespace mx = mlx::core;

inline mx::Stream cpu_stream(mx::StreamOrDevice stream) { return mx::to_stream(stream, mx::Device::cpu); }

inline std::string shape_text(const mx::array& a) {
  std::string text = "[";
  for (std::size_t i = 0; i < a.ndim(); ++i) text += (i ? ", " : "") + std::to_string(a.shape(i));
  return text + "]";
}

inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

inline bool is_float(mx::Dtype type) {
  return type == mx::bfloat16 || type == mx::float16 || type == mx::float32;
}

inline Float float_of(mx::Dtype type) {
  return type == mx::bfloat16 ? Float::bf16 : type == mx::float16 ? Float::f16 : Float::f32;
}

inline std::string dtype_text(mx::Dtype type) {
  std::ostringstream text;
  text << type;
  return text.str();
}

// Returns a text such as "float32 [2, 3]".
inline std::string array_text(const mx::array& a) { return dtype_text(a.dtype()) + " " + shape_text(a); }

// Throws std::invalid_argument unless x has floats and `right` is true; `shape`: the expected shape, as text.
inline void require_floats(const char* name, const mx::array& x, bool right, const std::string& shape) {
  if (!right || !is_float(x.dtype()))
    throw std::invalid_argument(std::string(name) + " must be bfloat16, float16 or float32 " + shape +
                                ", got " + array_text(x));
}

inline void require_integers(const char* name, const mx::array& x) {
  require(mx::issubdtype(x.dtype(), mx::integer),
          std::string(name) + " must be integers, got " + dtype_text(x.dtype()));
}

// Copies the elements of a strided array in row-major order. (libmlx has this as copy_cpu, but does not
// export it.)
template <class T>
void copy_strided(const T* source, const mx::Shape& shape, const mx::Strides& strides, std::size_t dim,
                  T*& target) {
  if (dim == shape.size()) {
    *target++ = *source;
    return;
  }
  for (int i = 0; i < shape[dim]; ++i)
    copy_strided(source + i * strides[dim], shape, strides, dim + 1, target);
}

// Returns `input` if it is row-contiguous, else a copy, which the stream makes when it gets there.
inline mx::array row_contiguous(const mx::array& input, Encoder& encoder) {
  if (input.flags().row_contiguous) return input;
  mx::array copy(input.shape(), input.dtype(), nullptr, {});
  allocate(copy);
  encoder.add_temporary(copy);
  encoder.dispatch([from = input.data<char>(), to = copy.data<char>(), shape = input.shape(),
                    strides = input.strides(), size = input.itemsize()]() mutable {
    if (size == 4) {
      auto* target = reinterpret_cast<uint32_t*>(to);
      copy_strided(reinterpret_cast<const uint32_t*>(from), shape, strides, 0, target);
    } else {
      auto* target = reinterpret_cast<uint16_t*>(to);
      copy_strided(reinterpret_cast<const uint16_t*>(from), shape, strides, 0, target);
    }
  });
  return copy;
}

// Converts ids of any integer type to int32. 64-bit ids that do not fit are clamped to the nearest int32,
// which no table has; wrapped, they could select a wrong row.
inline mx::array narrow_ids(const mx::array& ids, mx::StreamOrDevice stream) {
  mx::array within = ids;
  if (ids.itemsize() == 8) within = mx::minimum(within, mx::array(INT32_MAX, ids.dtype()), stream);
  if (ids.dtype() == mx::int64) within = mx::maximum(within, mx::array(INT32_MIN, ids.dtype()), stream);
  return mx::astype(within, mx::int32, stream);
}

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
