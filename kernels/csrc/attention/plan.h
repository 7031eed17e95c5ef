// Division of a paged-attention call into items for threads.
#pragma once

#include <vector>

#include "attention/attention.h"

namespace octavo {

struct AttendPlan {
  std::vector<AttendItem> items;  // heaviest first
  std::vector<MergeItem> merges;
  int64_t partial_floats = 0;
};

// A row's kernel and the division of its positions depend only on its own sequence. So the row's result is
// bit-identical for any number of threads and with any other sequences in the batch.
AttendPlan plan_attention(const AttendArgs& args, int width);

// Returns how many query heads an item of a latent call has; the item reads each latent once for all heads.
// The number is the largest that leaves items for every thread. Results are bit-identical for any number.
int latent_group(const AttendArgs& args);

}  // namespace octavo
