// What the graph nodes of all recurrences share.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "program/primitive.h"
#include "recurrent/kernels.h"
#include "recurrent/recurrent.h"
#include "runtime/dispatch.h"

namespace octavo {

// pool, segments, checkpoints, then what the recurrence reads -> the pool, y.
class RecurrentPrimitive : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

 protected:
  static constexpr std::size_t kFirstInput = 3;

  // The pool's memory; the outputs have memory after it.
  template <class T>
  static T* take_pool(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
    require(inputs[0].flags().row_contiguous, "a pool must be row contiguous");
    outputs[0].copy_shared_buffer(inputs[0]);
    allocate(outputs[1]);
    return outputs[0].data<T>();
  }

  static StateStep step_of(const std::vector<mx::array>& inputs, Encoder& encoder) {
    const mx::array segments = row_contiguous(inputs[1], encoder);
    const mx::array checkpoints = row_contiguous(inputs[2], encoder);
    return {segments.data<int32_t>(), checkpoints.data<int32_t>(),  segments.shape(0),
            checkpoints.shape(0),     inputs[kFirstInput].shape(0), inputs[0].shape(0)};
  }

  // The first inputs as `fields`, in order.
  static void take_rows(const std::vector<mx::array>& inputs, std::initializer_list<Rows*> fields,
                        Encoder& encoder) {
    std::size_t i = kFirstInput;
    for (Rows* const field : fields) *field = rows_of(inputs[i++], encoder);
  }

  // Rows along the first axis, as they lie if each has no gaps.
  static Rows rows_of(const mx::array& input, Encoder& encoder) {
    int64_t expected = 1;
    bool dense = true;
    for (int i = static_cast<int>(input.ndim()) - 1; i > 0; expected *= input.shape(i--))
      dense = dense && (input.shape(i) == 1 || input.strides(i) == expected);
    if (dense) return {input.data<void>(), input.strides(0), float_of(input.dtype())};
    const mx::array copy = row_contiguous(input, encoder);
    return {copy.data<void>(), expected, float_of(copy.dtype())};
  }
};

inline void require_step(const mx::array& pool, const StepArrays& step) {
  const auto ints = [](const mx::array& x, int columns) {
    return x.dtype() == mx::int32 && x.ndim() == 2 && x.shape(1) == columns;
  };
  require(ints(step.segments, 4), "segments must be int32 [S, 4], got " + dtype_text(step.segments.dtype()) +
                                      " " + shape_text(step.segments));
  require(ints(step.checkpoints, 2), "checkpoints must be int32 [C, 2], got " +
                                         dtype_text(step.checkpoints.dtype()) + " " +
                                         shape_text(step.checkpoints));
  require(pool.ndim() >= 2 && pool.size() > 0, "a pool must have slots, got " + shape_text(pool));
}

inline void require_shape(const char* name, const mx::array& x, const mx::Shape& shape) {
  if (x.shape() == shape && is_float(x.dtype())) return;
  require(false, std::string(name) + " must be bfloat16, float16 or float32 " +
                     shape_text(mx::zeros(shape, mx::float32)) + ", got " + dtype_text(x.dtype()) + " " +
                     shape_text(x));
}

inline void require_pool(const mx::array& pool, const char* axes, std::size_t num_axes) {
  require(pool.ndim() == num_axes && pool.dtype() == mx::float32,
          std::string("pool must be float32 ") + axes + ", got " + dtype_text(pool.dtype()) + " " +
              shape_text(pool));
}

inline void require_multiple(const char* what, int size, int factor) {
  require(size % factor == 0, std::string(what) + " must be a multiple of " + std::to_string(factor) +
                                  ", got " + std::to_string(size));
}

// Parameters are read as float32 without gaps.
inline mx::array parameter(const mx::array& x, mx::Stream stream) {
  return mx::contiguous(mx::astype(x, mx::float32, stream), false, stream);
}

inline PoolAndRows make_node(std::shared_ptr<mx::Primitive> primitive, std::vector<mx::array> inputs,
                             const mx::Shape& y, mx::Dtype type) {
  const mx::Shape pool = inputs[0].shape();
  const mx::Dtype pool_type = inputs[0].dtype();
  const std::vector<mx::array> out =
      mx::array::make_arrays({pool, y}, {pool_type, type}, std::move(primitive), std::move(inputs));
  return {out[0], out[1]};
}

}  // namespace octavo
