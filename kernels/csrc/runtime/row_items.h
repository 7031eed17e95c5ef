// Rows of an operation, shared out to threads. Internal linkage: see numeric.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/threads.h"

namespace octavo {
namespace {

// body(first row, last row) for all rows, `most` to an item: fewer, but no less than a quarter of that, if
// some threads had none otherwise. What is one item stays one, but for two threads: more of them begin too
// late.
template <class Body>
inline void for_row_items(int64_t rows, int64_t most, Body&& body) {
  const int64_t share = (rows + num_threads() - 1) / num_threads(),
                size = rows <= most && num_threads() > 2
                           ? most
                           : std::clamp(share, std::max<int64_t>(1, most / 4), most);
  parallel_for(static_cast<int>((rows + size - 1) / size),
               [&](int item) { body(item * size, std::min(rows, (item + 1) * size)); });
}

}  // namespace
}  // namespace octavo
