// Where a primitive puts its work: into the queue of its MLX stream, or into a program that is being
// captured (program/program.h) and runs the same work again and again, without a graph.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "runtime/lines.h"

namespace octavo {

namespace mx = mlx::core;

// Memory of the intermediate results of programs that never run at the same time. A range of it is used again
// once the array in it is gone; a new capture begins with all of it, whatever earlier ones hold. So it is
// as large as what the largest program needs at once, at most about twice that, however many there are.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void reuse_all();
  void allocate(mx::array& output);
  std::size_t nbytes() const;  // that any array has had

 private:
  struct Range {
    std::size_t begin, end;
  };

  // Programs keep addresses, so it stays where it is.
  struct Segment {
    Lines memory;
    std::size_t size, used;   // bytes, and those of them up to the end of any array so far
    std::vector<Range> free;  // in their order, never side by side
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

// Work and memory of primitives that are evaluated on this thread while it lives.
class Capture {
 public:
  explicit Capture(std::shared_ptr<Arena> arena);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  static Capture* current();

  std::shared_ptr<Arena> arena;
  Tasks tasks;
  std::vector<std::size_t> queued;     // those of the tasks that only put work of MLX's into its queue,
  std::optional<mx::Stream> stream;    // which is this stream's
  std::vector<mx::array> temporaries;  // of the primitive that is evaluated
};

// Adds the time until its end to what kernels have taken in this process.
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

// Gives an output memory of its own.
void allocate(mx::array& output);

class Encoder {
 public:
  explicit Encoder(mx::Stream stream) : stream_(stream) {}

  template <class Task>
  void dispatch(Task&& task) {
    if (Capture* const capture = Capture::current()) capture->tasks.emplace_back(std::forward<Task>(task));
    else
      mx::cpu::get_command_encoder(stream_).dispatch([task = std::forward<Task>(task)]() mutable {
        const KernelTime timed;
        task();
      });
  }

  // Holds an array for the work that has been dispatched.
  void add_temporary(mx::array array) {
    if (Capture* const capture = Capture::current()) capture->temporaries.push_back(std::move(array));
    else mx::cpu::get_command_encoder(stream_).add_temporary(std::move(array));
  }

 private:
  mx::Stream stream_;
};

}  // namespace octavo
