// Operations of MLX's as part of a program.
#pragma once

#include <exception>

#include "program/encoder.h"

namespace octavo {

// Puts the evaluation of x, a pending result of MLX's own, into the program that is being captured: in each
// run MLX's primitive is given what the program has computed, and what it gives is copied to where the
// program reads it. Nothing is evaluated now: the inputs have no values yet. Throws std::invalid_argument for
// a primitive that lies on another stream than one before it.
void capture_evaluation(mx::array& x);

// Runs tasks of which those at `queued` (ascending) put their work into the queue of `stream` themselves, in
// their order; all of it happens on that queue's thread, and is done on return. Throws what one of them
// throws.
void run_queued(const Tasks& tasks, const std::vector<std::size_t>& queued, mx::Stream stream);

}  // namespace octavo
