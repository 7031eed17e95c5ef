#include "pages/indices.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

bool all_below(Ints values, int64_t limit) {
  for (const int32_t value : values)
    if (value < 0 || value >= limit) return false;
  return true;
}

}  // namespace

bool are_inside(const StepIndices& step, int64_t page_size, int64_t num_pages) {
  const std::size_t tokens = step.positions.size(), sequences = step.kv_len.size();
  if (tokens == 0 || sequences == 0 || step.slots.size() != tokens || step.q_start.size() != sequences + 1 ||
      step.page_table.size() != sequences * static_cast<std::size_t>(step.table_width))
    return false;
  if (!all_below(step.slots, num_pages * page_size) || !all_below(step.page_table, num_pages) ||
      !all_below(step.kv_len, step.table_width * page_size + 1))
    return false;
  if (step.q_start[0] != 0 || step.q_start[sequences] != static_cast<int64_t>(tokens)) return false;
  for (std::size_t b = 0; b < sequences; ++b)
    if (step.q_start[b + 1] <= step.q_start[b]) return false;
  for (std::size_t b = 0; b < sequences; ++b)
    for (int32_t row = step.q_start[b]; row < step.q_start[b + 1]; ++row)
      if (step.positions[row] < 0 || step.positions[row] >= step.kv_len[b]) return false;
  return true;
}

void pack(const StepIndices& step, Ints starts, std::span<int32_t> to) {
  const std::size_t tokens = step.positions.size(), sequences = step.kv_len.size(),
                    others = 3 * tokens + 2 * sequences + 1,
                    narrow = static_cast<std::size_t>(step.table_width),
                    width = to.size() < others ? 0 : (to.size() - others) / sequences;
  if (width < narrow || to.size() != others + width * sequences)
    throw std::invalid_argument("packed must have space for a table of at least " + std::to_string(narrow) +
                                " columns, got " + std::to_string(to.size()) + " numbers");
  int32_t* next = to.data();
  const auto append = [&](Ints values) { next = std::copy(values.begin(), values.end(), next); };
  append(step.slots);
  append(step.q_start);
  append(step.kv_len);
  for (std::size_t b = 0; b < sequences; ++b) {
    append(step.page_table.subspan(b * narrow, narrow));
    next = std::fill_n(next, width - narrow, 0);
  }
  next = starts.empty() ? std::fill_n(next, tokens, 0) : std::copy(starts.begin(), starts.end(), next);
  std::fill_n(next, tokens, 0);
}

}  // namespace octavo
