#include "recurrent/segments.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace octavo {
namespace {

void require_slot(int slot, int lowest, int num_slots) {
  if (slot < lowest || slot >= num_slots)
    throw std::invalid_argument("slot " + std::to_string(slot) + " is outside the " +
                                std::to_string(num_slots) + " slots of the pool");
}

}  // namespace

Plan plan_pieces(const StateStep& step) {
  std::vector<std::pair<int, int>> kept;  // (row, slot)
  for (int i = 0; i < step.num_checkpoints; ++i) {
    const int row = step.checkpoints[2 * i], slot = step.checkpoints[2 * i + 1];
    if (row < 0) continue;
    require_slot(slot, 0, step.num_slots);
    kept.emplace_back(row, slot);
  }
  std::sort(kept.begin(), kept.end());
  Plan plan;
  plan.first.push_back(0);
  for (int i = 0; i < step.num_segments; ++i) {
    const int32_t* const segment = step.segments + 4 * i;
    int start = segment[0], source = segment[2];
    const int end = start + segment[1], target = segment[3];
    if (segment[1] > 0) {
      if (start < 0 || end > step.num_rows)
        throw std::invalid_argument("rows [" + std::to_string(start) + ", " + std::to_string(end) +
                                    ") are outside the " + std::to_string(step.num_rows) +
                                    " rows of the step");
      require_slot(source, -1, step.num_slots);
      require_slot(target, 0, step.num_slots);
      for (auto at = std::lower_bound(kept.begin(), kept.end(), std::pair(start, -1));
           at != kept.end() && at->first < end; ++at) {
        plan.pieces.push_back({start, at->first + 1 - start, source, at->second});
        start = at->first + 1;
        source = at->second;
      }
      if (start < end || source != target) plan.pieces.push_back({start, end - start, source, target});
    }
    plan.first.push_back(static_cast<int>(plan.pieces.size()));
  }
  return plan;
}

}  // namespace octavo
