// A fork-join pool for kernels: MLX runs a stream on one thread, and primitives fork here.
//
// The caller takes part. After a job, helpers spin for some microseconds, so that the next job of the same
// step finds them awake. Then they sleep on a futex, so an idle engine uses no CPU. A helper that the system
// has not scheduled in time does not delay the join; it finds the job closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace octavo {

// Number of threads for a kernel, the caller included.
int num_threads();

// Sets num_threads(); std::invalid_argument unless 1 <= n <= 1024. Waits for a running job to end.
void set_threads(int n);

// OCTAVO_CPU_THREADS if set (std::invalid_argument unless a whole number from 1 to 1024), else the
// number of CPUs this process may run on (its affinity mask).
int default_threads();

// Calls task(context, item) for each item in [0, items) on up to num_threads() threads, and returns when all
// are done. Each thread begins with its own contiguous share. An idle thread steals half of another thread's
// remaining items. Tasks must not throw and must not call run_parallel. Jobs of several MLX streams run one
// after the other.
void run_parallel(int items, void (*task)(void* context, int item), void* context);

// Returns a buffer of this thread, at least `bytes` long, from allocate_lines. The next call for the same
// slot (0 <= slot < 4) on this thread invalidates it. The caller of parallel_for is also a worker, so data
// that it passes to tasks must be in another slot than theirs.
void* thread_scratch(std::size_t bytes, int slot = 0);

namespace {

// Calls body(item) for each item in [0, items). Local to each translation unit, so that code compiled for one
// instruction set is never shared with another's.
template <class Body>
inline void parallel_for(int items, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  run_parallel(
      items, [](void* context, int item) { (*static_cast<Plain*>(context))(item); },
      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

}  // namespace
}  // namespace octavo
