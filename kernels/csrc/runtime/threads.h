// A fork-join thread pool for kernels. MLX runs each stream on one thread, which divides its primitives' work
// here.
//
// The caller is one of the threads. After a job, helpers spin for some microseconds, so that they are awake
// for the next job of the same step. Then they sleep on a futex, so an idle engine uses no CPU. A helper that
// wakes too late does not delay the end of a job, because it finds the job closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace octavo {

// Returns the number of threads for a kernel, including the caller.
int num_threads();

// Sets num_threads(); std::invalid_argument unless 1 <= n <= 1024. Waits for a running job to end.
void set_threads(int n);

// Returns OCTAVO_CPU_THREADS if set, else the number of CPUs in this process's affinity mask. Throws
// std::invalid_argument unless the variable is a whole number from 1 to 1024.
int default_threads();

// Calls task(context, item) for each item in [0, items) on up to num_threads() threads, and returns when all
// are done. Each thread begins with consecutive items, and an idle thread steals half of another's remaining
// items. Tasks must not throw and must not call run_parallel. Jobs of several MLX streams run one after the
// other.
void run_parallel(int items, void (*task)(void* context, int item), void* context);

// Returns a buffer of this thread with at least `bytes` bytes, from allocate_lines. It is valid until this
// thread calls again with the same slot (0 <= slot < 4). The caller of parallel_for runs tasks, too, so data
// that it passes to them must be in a slot that they do not use.
void* thread_scratch(std::size_t bytes, int slot = 0);

namespace {

// Calls body(item) for each item in [0, items). It has internal linkage, so that the linker never merges code
// of different instruction sets.
template <class Body>
inline void parallel_for(int items, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  run_parallel(
      items, [](void* context, int item) { (*static_cast<Plain*>(context))(item); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace
}  // namespace octavo
