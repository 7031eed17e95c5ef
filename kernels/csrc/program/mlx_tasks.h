// Evaluation of MLX's own operations by tasks of a program.
#pragma once

#include <exception>

#include "program/encoder.h"

namespace octavo {

// Adds the evaluation of x, an unevaluated result of MLX's own operations, to the program that is being
// captured. In each run, MLX's primitive gets the program's arrays, and its results are copied to the
// addresses that the program reads. Nothing is evaluated now, because inputs have no values yet. Throws
// std::invalid_argument if the primitive's stream differs from that of earlier primitives.
void capture_evaluation(mx::array& x);

// Runs tasks in order on the thread of `stream`'s queue, and returns when all are done. Tasks with indices in
// `queued` (ascending) enqueue work on this stream themselves. Rethrows the exception of a task.
void run_queued(const Tasks& tasks, const std::vector<std::size_t>& queued, mx::Stream stream);

}  // namespace octavo
