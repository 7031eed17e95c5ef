// A fork-join pool for kernels: MLX runs a stream on one thread, a primitive that wants more forks here.
//
// The caller takes part. Helpers spin for some microseconds after a job, so that the next one of the
// same step finds them awake, and then sleep on a futex: an idle engine burns nothing. A helper that
// the system has not scheduled in time cannot delay the join; it simply finds the job closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace octavo {

// Threads a kernel may use, the caller included.
int num_threads();

// Change it; std::invalid_argument unless 1 <= n <= 1024. Waits for a running job to end.
void set_threads(int n);

// OCTAVO_CPU_THREADS if set (std::invalid_argument unless a whole number from 1 to 1024), else the
// number of CPUs this process may run on (its affinity mask).
int default_threads();

// Call task(context, item) for each item in [0, items) on up to num_threads() threads, and return when
// all are done. Each thread begins with a share of its own, item after item; who has ended takes half
// of what another has left. Tasks must not throw and must not call this again.
// Jobs of several MLX streams are run one after the other.
void run_parallel(int items, void (*task)(void* context, int item), void* context);

// A buffer of this thread's own, as allocate_lines gives them, at least `bytes` long; its contents are lost
// with the next call for the same slot (0 <= slot < 4) on the same thread. The caller of parallel_for is also
// a worker: what it hands to the tasks must lie in another slot than what they use.
void* thread_scratch(std::size_t bytes, int slot = 0);

namespace {

// body(item) for each item in [0, items). Local to each translation unit, so that code compiled
// for one instruction set is never shared with another's.
template <class Body>
inline void parallel_for(int items, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  run_parallel(
      items, [](void* context, int item) { (*static_cast<Plain*>(context))(item); },
      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

}  // namespace
}  // namespace octavo
