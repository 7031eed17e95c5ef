#include "program/mlx_tasks.h"

#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "program/primitive.h"

namespace octavo {
namespace {

// Returns an array over the same memory that does not own it. So the arena can reuse the memory, and MLX does
// not write to it in place.
mx::array borrow(const mx::array& from) {
  mx::array borrowed(from.shape(), from.dtype(), nullptr, {});
  borrowed.set_data(mx::array::Data(from.buffer(), [](mx::allocator::Buffer) {}), from.data_size(),
                    from.strides(), from.flags(), from.offset());
  return borrowed;
}

struct Target {
  mx::Shape shape;
  mx::Dtype type;
  char* memory;
};

void copy_to(const Target& target, const mx::array& from) {
  if (from.flags().row_contiguous) std::memcpy(target.memory, from.data<char>(), from.nbytes());
  else copy_strided(from.data<char>(), from.shape(), from.strides(), from.itemsize(), target.memory);
}

// Evaluation of one primitive of MLX in each run.
class Evaluation {
 public:
  Evaluation(const std::shared_ptr<mx::Primitive>& primitive, const std::vector<mx::array>& inputs,
             const std::vector<mx::array>& outputs)
      : primitive_(primitive) {
    for (const mx::array& input : inputs) inputs_.push_back(borrow(input));
    for (const mx::array& output : outputs)
      targets_.push_back({output.shape(), output.dtype(), mx::array(output).data<char>()});
  }

  void operator()() const {
    std::vector<mx::array> results;
    for (const Target& target : targets_)
      results.emplace_back(target.shape, target.type, nullptr, std::vector<mx::array>{});
    primitive_->eval_cpu(inputs_, results);
    auto& encoder = mx::cpu::get_command_encoder(primitive_->stream());
    auto temporaries = std::exchange(encoder.temporaries(), {});
    encoder.dispatch(
        [results = std::move(results), temporaries = std::move(temporaries), targets = targets_] {
          for (std::size_t i = 0; i < results.size(); ++i)
            if (results[i].size() > 0) copy_to(targets[i], results[i]);
        });
  }

 private:
  std::shared_ptr<mx::Primitive> primitive_;
  std::vector<mx::array> inputs_;
  std::vector<Target> targets_;
};

// Adds the evaluation of x to the program that is being captured. In each run, MLX's primitive gets the
// program's arrays, and its results are copied to the addresses that the program reads. Nothing is evaluated
// now, because inputs have no values yet.
void capture_evaluation(mx::array& x) {
  Capture* const capture = Capture::current();
  const mx::Stream stream = x.primitive().stream();
  require(!capture->stream || *capture->stream == stream, "operations of several streams cannot be captured");
  capture->stream = stream;
  std::vector<mx::array> outputs = x.outputs();
  for (mx::array& output : outputs) allocate(output);
  capture->queued.push_back(capture->tasks.size());
  capture->tasks.emplace_back(Evaluation(x.primitive_ptr(), x.inputs(), outputs));
}

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

void run_queued(const Tasks& tasks, const std::vector<std::size_t>& queued, mx::Stream stream) {
  std::exception_ptr failure;
  auto& encoder = mx::cpu::get_command_encoder(stream);
  const auto dispatch_ours = [&](std::size_t first, std::size_t end) {
    if (first == end) return;
    encoder.dispatch([&tasks, &failure, first, end] {
      if (failure) return;
      const KernelTime timed;
      try {
        for (std::size_t i = first; i < end; ++i) tasks[i]();
      } catch (...) {
        failure = std::current_exception();
      }
    });
  };
  std::size_t next = 0;
  try {
    for (const std::size_t at : queued) {
      dispatch_ours(next, at);
      tasks[at]();
      next = at + 1;
    }
    dispatch_ours(next, tasks.size());
  } catch (...) {
    mx::synchronize(stream);  // queued work refers to objects on this call's stack
    throw;
  }
  mx::synchronize(stream);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace octavo
