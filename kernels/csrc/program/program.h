// A step's graph as a list of what its kernels do, so that the next step of the same shapes needs no graph.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "program/encoder.h"

namespace octavo {

// What a graph computes from `filled`, arrays of int32 that are given new values before each run.
//
// Capturing evaluates every primitive between the inputs and the outputs once, but carries nothing out:
// their work is kept, with the addresses of the arrays it reads and writes. Operations of MLX's are views of
// what is there, work of ours in their place where they are simple arithmetic (program/captured_ops.h), or
// evaluated by MLX in each run (program/mlx_tasks.h); what depends on no input is computed at once. A program
// writes its results to the same arrays in every run. They hold them until any program of its arena is
// captured or run.
class Program {
 public:
  // `evaluate` computes arrays, as mx::eval does: of a graph of Python's without the interpreter's lock,
  // which other threads may need before they have done their part of it.
  using Evaluate = void (*)(std::vector<mx::array>);

  // `fixed` are further inputs, which keep their place in memory: their contents may change. Throws
  // std::invalid_argument naming an operation that cannot be captured; the graph is then spoiled.
  Program(const std::shared_ptr<Arena>& arena, std::vector<mx::array> filled, std::vector<mx::array> fixed,
          std::vector<mx::array> outputs, Evaluate evaluate);

  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Where a filled input is, and how many numbers it has.
  struct Input {
    int32_t* memory;
    std::size_t size;
  };

  const std::vector<mx::array>& filled() const { return filled_; }
  const std::vector<Input>& inputs() const { return inputs_; }  // the filled ones
  const std::vector<mx::array>& outputs() const { return outputs_; }
  std::size_t num_tasks() const { return tasks_.size(); }
  std::size_t num_evaluated() const { return queued_.size(); }  // of them, by MLX

  // On the calling thread, with the kernels' own threads; where MLX computes some of it, on its stream's.
  void run();

 private:
  void capture(const std::shared_ptr<Arena>& arena, std::vector<mx::array> order,
               const std::vector<bool>& depends);
  void evaluate(Capture& capture, mx::array& x);

  std::vector<mx::array> filled_, outputs_;
  std::vector<Input> inputs_;
  std::vector<mx::array> read_;  // by the tasks, besides each other's results
  Tasks tasks_;
  std::vector<std::size_t> queued_;  // as Capture's
  std::optional<mx::Stream> stream_;
};

}  // namespace octavo
