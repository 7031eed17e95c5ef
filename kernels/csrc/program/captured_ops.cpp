#include "program/captured_ops.h"

#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "program/mlx_tasks.h"
#include "program/primitive.h"

namespace octavo {
namespace {

bool is_one_of(const char* name, std::initializer_list<const char*> names) {
  for (const char* known : names)
    if (std::strcmp(name, known) == 0) return true;
  return false;
}

// Reshapes `input` to the shape of `output`, with the same elements in the same order.
void reshape(const mx::array& input, mx::array& output, Encoder& encoder) {
  const mx::array plain = row_contiguous(input, encoder);
  mx::Strides strides(output.ndim());
  int64_t stride = 1;
  for (std::size_t i = output.ndim(); i-- > 0; stride *= output.shape(static_cast<int>(i)))
    strides[i] = stride;
  output.copy_shared_buffer(plain, strides, plain.flags(), plain.data_size());
}

float load(const void* values, Float type, std::size_t i) {
  if (type == Float::f32) return static_cast<const float*>(values)[i];
  const uint16_t bits = static_cast<const uint16_t*>(values)[i];
  return type == Float::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

void store(void* values, Float type, std::size_t i, float value) {
  if (type == Float::f32) static_cast<float*>(values)[i] = value;
  else static_cast<uint16_t*>(values)[i] = type == Float::bf16 ? float_to_bf16(value) : float_to_f16(value);
}

// Adds or multiplies like MLX: 16-bit floats are computed in float32 and rounded once.
void combine(const mx::array& a, const mx::array& b, mx::array& output, bool multiply, Encoder& encoder) {
  const mx::array left = row_contiguous(a, encoder), right = row_contiguous(b, encoder);
  allocate(output);
  encoder.dispatch([x = left.data<void>(), y = right.data<void>(), to = output.data<void>(),
                    type = float_of(output.dtype()), size = output.size(), multiply] {
    for (std::size_t i = 0; i < size; ++i) {
      const float first = load(x, type, i), second = load(y, type, i);
      store(to, type, i, multiply ? first * second : first + second);
    }
  });
}

void convert(const mx::array& input, mx::array& output, Encoder& encoder) {
  const mx::array plain = row_contiguous(input, encoder);
  allocate(output);
  encoder.dispatch([from = plain.data<void>(), to = output.data<void>(), size = output.size(),
                    type = float_of(input.dtype()), result = float_of(output.dtype())] {
    for (std::size_t i = 0; i < size; ++i) store(to, result, i, load(from, type, i));
  });
}

}  // namespace

void capture_mlx(mx::array& x) {
  const char* const name = x.primitive().name();
  const std::vector<mx::array>& inputs = x.inputs();
  Encoder encoder(x.primitive().stream());
  const auto can_copy = [](const mx::array& input) {  // row_contiguous can copy such arrays
    return input.flags().row_contiguous || input.itemsize() == 2 || input.itemsize() == 4;
  };
  if (is_one_of(name, {"Reshape", "Flatten", "Unflatten", "Contiguous"}) && can_copy(inputs[0])) {
    reshape(inputs[0], x, encoder);
  } else if (is_one_of(name, {"Add", "Multiply"}) && is_float(x.dtype())) {
    combine(inputs[0], inputs[1], x, std::strcmp(name, "Multiply") == 0, encoder);
  } else if (is_one_of(name, {"AsType"}) && is_float(x.dtype()) && is_float(inputs[0].dtype())) {
    convert(inputs[0], x, encoder);
  } else if (is_one_of(name, {"AsStrided", "Broadcast", "ExpandDims", "Slice", "Split", "Squeeze",
                              "StopGradient", "Transpose"})) {
    std::vector<mx::array> outputs = x.outputs();
    x.primitive().eval_cpu(inputs, outputs);
  } else {
    capture_evaluation(x);
  }
}

}  // namespace octavo
