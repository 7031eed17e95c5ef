// A step's graph, recorded as a list of its kernels' work. Later steps of equal shapes need no graph.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "program/encoder.h"

namespace octavo {

// The recorded computation of a graph, whose int32 inputs (`filled`) get new values before each run.
//
// Capturing visits every primitive between inputs and outputs once, without computing, and records its work
// with the addresses that it reads and writes. MLX's operations become views, tasks of Octavo for simple
// arithmetic, or evaluations by MLX in each run (program/mlx_tasks.h). Operations
// that depend on no input are computed at once. A program writes its results to the same arrays in every run.
// Results are valid until any program of its arena is captured or run.
class Program {
 public:
  // `evaluate` computes arrays like mx::eval. For graphs from Python it releases the GIL, because other
  // threads may need the GIL to finish their part.
  using Evaluate = void (*)(std::vector<mx::array>);

  // `fixed`: other inputs, which stay at their addresses although their contents may change. Throws
  // std::invalid_argument with the name of an operation that cannot be captured; the graph is then unusable.
  Program(const std::shared_ptr<Arena>& arena, std::vector<mx::array> filled, std::vector<mx::array> fixed,
          std::vector<mx::array> outputs, Evaluate evaluate);

  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Address and number of values of a filled input.
  struct Input {
    int32_t* memory;
    std::size_t size;
  };

  const std::vector<mx::array>& filled() const { return filled_; }
  const std::vector<Input>& inputs() const { return inputs_; }  // filled inputs
  const std::vector<mx::array>& outputs() const { return outputs_; }
  std::size_t num_tasks() const { return tasks_.size(); }
  std::size_t num_evaluated() const { return queued_.size(); }  // tasks that MLX evaluates

  // Runs the tasks on the calling thread and the kernels' threads. MLX's tasks run on their stream's thread.
  void run();

 private:
  void capture(const std::shared_ptr<Arena>& arena, std::vector<mx::array> order,
               const std::vector<bool>& depends);
  void evaluate(Capture& capture, mx::array& x);

  std::vector<mx::array> filled_, outputs_;
  std::vector<Input> inputs_;
  std::vector<mx::array> read_;  // keeps arrays alive that tasks read, except results of tasks
  Tasks tasks_;
  std::vector<std::size_t> queued_;  // see Capture
  std::optional<mx::Stream> stream_;
};

}  // namespace octavo
