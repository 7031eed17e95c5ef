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

// The cuts of a row, and its kernel, depend only on its own sequence. So neither the number of threads nor
// other sequences of the batch change a bit of its result.
AttendPlan plan_attention(const AttendArgs& args, int width);

// Query heads that an item of a latent call takes together, reading each latent once for them: as many as
// possible while every thread has items. No bit of a result depends on it.
int latent_group(const AttendArgs& args);

}  // namespace octavo
