// Writing of results by kernels on AMX tiles. Internal linkage: see numeric.h.
#pragma once

#include "linear/amx_tiles.h"

namespace octavo::amx {
namespace {

// Writes a thread's results of rows from `first_row` on. Writing to y is slow, because other cores may have
// its cache lines. So gates stay in local memory until the values that they multiply are computed, and
// results of many rows bypass the caches.
class Results {
 public:
  // Returns the bytes of memory for the gates of `rows` rows.
  static std::size_t bytes(const LinearCall& call, int rows) {
    return call.gate ? row_bytes(call) * rows : 0;
  }

  Results(const LinearCall& call, int first_row, void* memory)
      : first_row_(first_row),
        row_bytes_(row_bytes(call)),
        gates_(call.gate ? static_cast<char*>(memory) : nullptr),
        stream_(call.rows > kTileRows && can_stream(call)) {}
  // Orders results that bypassed the caches before this thread's next writes.
  ~Results() { _mm_sfence(); }
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;

  // Returns where and how rows from `row` on are written.
  Writing at(int row) const {
    return {gates_ == nullptr ? nullptr : gates_ + row_bytes_ * (row - first_row_), stream_};
  }

 private:
  static std::size_t row_bytes(const LinearCall& call) { return kPanel * float_size(call.y_type); }
  // Whether every panel of every row of y begins at a cache line.
  static bool can_stream(const LinearCall& call) {
    const int outputs = call.weight->shape.outputs / (call.gate ? 2 : 1);
    return call.y_type == Float::bf16 && outputs % 32 == 0 && reinterpret_cast<uintptr_t>(call.y) % 64 == 0;
  }

  int first_row_;
  std::size_t row_bytes_;
  char* gates_;
  bool stream_;
};

}  // namespace
}  // namespace octavo::amx
