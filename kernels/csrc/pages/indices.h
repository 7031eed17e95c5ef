// Whether a step's indices stay inside a pool: no kernel checks them.
#pragma once

#include <cstdint>
#include <span>

namespace octavo {

using Ints = std::span<const int32_t>;

// See kernels/metadata.py.
struct StepIndices {
  Ints positions, slots;  // [T]
  Ints q_start;           // [B + 1]
  Ints kv_len;            // [B]
  Ints page_table;        // [B, table_width]
  int64_t table_width;
};

// What AttentionMetadata.check says of such arrays, without a reason.
bool are_inside(const StepIndices& step, int64_t page_size, int64_t num_pages);

// What programs are given of a step whose indices are inside: slots, q_start, kv_len, the page table, widened
// with zeros, starts, or zeros where it is empty, and a zero for each row. `to` has room for all of
// that, and its size says how wide the table becomes; std::invalid_argument if that is no width.
void pack(const StepIndices& step, Ints starts, std::span<int32_t> to);

}  // namespace octavo
