#include "program/mlx_tasks.h"

#include <cstring>
#include <string>

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

}  // namespace

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
