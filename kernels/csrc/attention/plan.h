// How one call of paged attention is cut into items for threads.
#pragma once

#include <vector>

#include "attention/attention.h"

namespace octavo {

struct AttendPlan {
  std::vector<AttendItem> items;  // heaviest first
  std::vector<MergeItem> merges;
  int64_t partial_floats = 0;
};

// Where a row is cut, and what it is computed with, depends on its own sequence alone: neither the
// number of threads nor the other sequences of the batch change a bit of its result.
AttendPlan plan_attention(const AttendArgs& args, int width);

// Query heads that an item of a call over latents takes together, and reads each latent once for: many, but
// so few that every thread has items. No bit of a result depends on it.
int latent_group(const AttendArgs& args);

}  // namespace octavo
