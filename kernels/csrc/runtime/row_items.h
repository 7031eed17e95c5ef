// Division of an operation's rows among threads. Internal linkage: see numeric.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/threads.h"

namespace octavo {
namespace {

// Calls body(first row, last row) for all rows, with up to `most` rows per item. If some threads would have
// none, items are smaller, but at least a quarter of `most`. Rows that fit in one item are split for at most
// two threads, because more threads would start too late.
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
