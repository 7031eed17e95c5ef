// Validation of a step's page indices, on which the kernels rely.
#pragma once

#include <cstdint>
#include <span>

namespace octavo {

using Ints = std::span<const int32_t>;

// A step's indices; kernels/metadata.py describes them.
struct StepIndices {
  Ints positions, slots;  // [T]
  Ints q_start;           // [B + 1]
  Ints kv_len;            // [B]
  Ints page_table;        // [B, table_width]
  int64_t table_width;
};

// Returns whether AttentionMetadata.check would accept the step.
bool are_inside(const StepIndices& step, int64_t page_size, int64_t num_pages);

// Writes the inputs of a captured program for a step with valid indices to `to`: slots, q_start, kv_len, the
// page table padded with zeros, starts (zeros if empty), and a zero for each row. The size of `to` determines
// the table's width; std::invalid_argument if no width fits.
void pack(const StepIndices& step, Ints starts, std::span<int32_t> to);

}  // namespace octavo
