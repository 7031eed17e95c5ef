// Capture of MLX's own operations in a program.
#pragma once

#include <exception>

#include "program/encoder.h"

namespace octavo {

// Captures x, an unevaluated result of MLX's own operations: as a view of its input if possible, as a task of
// Octavo if it is simple arithmetic, else as an evaluation by MLX in each run. Throws std::invalid_argument
// if the stream of an evaluation differs from that of earlier ones.
void capture_mlx(mx::array& x);

// Runs tasks in order on the thread of `stream`'s queue, and returns when all are done. Tasks with indices in
// `queued` (ascending) enqueue work on this stream themselves. Rethrows the exception of a task.
void run_queued(const Tasks& tasks, const std::vector<std::size_t>& queued, mx::Stream stream);

}  // namespace octavo
