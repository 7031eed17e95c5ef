// Destination of a primitive's work: the queue of its MLX stream, or a program that is being captured
// (program/program.h) and will repeat the work without a graph.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "mlx/mlx.h"
#include "runtime/lines.h"

namespace octavo {

namespace mx = mlx::core;

// Memory for intermediate results of programs, which may share it because they never run at the same time.
// Within a program, a range is reused once its array is destroyed. So for any number of programs, the arena
// is as large as the largest program needs, or at most about twice as large.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void reuse_all();
  void allocate(mx::array& output);
  std::size_t nbytes() const;  // bytes that any program's arrays need

 private:
  struct Range {
    std::size_t begin, end;
  };

  // A segment is never moved, because programs keep addresses.
  struct Segment {
    Lines memory;
    std::size_t size, used;   // size in bytes, and the end of the highest range ever used
    std::vector<Range> free;  // in ascending order; adjacent ranges are merged
  };

  struct Place {
    std::size_t segment;
    Range range;
  };

  Place take(std::size_t bytes);
  void release(const Place& place, int capture);

  std::vector<Segment> segments_;
  int capture_ = 0;
};

using Tasks = std::vector<std::function<void()>>;

// Collects the work and memory of primitives that this thread evaluates while the object exists.
class Capture {
 public:
  explicit Capture(std::shared_ptr<Arena> arena);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  static Capture* current();

  std::shared_ptr<Arena> arena;
  Tasks tasks;
  std::vector<std::size_t> queued;     // indices of tasks that only enqueue MLX's work
  std::optional<mx::Stream> stream;    // the stream that runs MLX's work
  std::vector<mx::array> temporaries;  // arrays of the primitive being evaluated
};

// Adds the time between construction and destruction to the process's total time of kernels.
class KernelTime {
 public:
  KernelTime() : began_(std::chrono::steady_clock::now()) {}
  ~KernelTime();
  KernelTime(const KernelTime&) = delete;
  KernelTime& operator=(const KernelTime&) = delete;

  static double seconds();

 private:
  std::chrono::steady_clock::time_point began_;
};

// Allocates an output's memory.
void allocate(mx::array& output);

class Encoder {
 public:
  explicit Encoder(mx::Stream stream) : stream_(stream) {}

  void dispatch(std::function<void()> task);

  // Keeps an array alive until the dispatched work is done.
  void add_temporary(mx::array array);

 private:
  mx::Stream stream_;
};

}  // namespace octavo
