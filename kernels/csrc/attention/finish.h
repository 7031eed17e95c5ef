// The end of a softmax: partial results of split KV ranges become output rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention/attention.h"
#include "attention/rows.h"
#include "attention/vectors.h"

namespace octavo {
namespace {

// Merge the partials of one item's rows, in order, fold in the sinks once, undo the rotation of V and
// write the output. `to_natural(accumulator, row)` copies an accumulator of `width` floats to the order
// of head dimensions.
template <class ToNatural>
void merge_partials(const AttendArgs& args, const MergeItem& item, const float* partials, int width,
                    ToNatural to_natural) {
  const RowFormat& format = args.layout.v;
  const int group = group_size(args), num_rows = item.num_tokens * group;
  const int64_t stride = partial_floats(args, item.num_tokens, width);
  const float* first = partials + item.partial;
  alignas(64) float total[kMaxDim + 64], row[kMaxDim + 64];
  for (int r = 0; r < num_rows; ++r) {
    const float* accumulator = first + int64_t(r) * width;
    const float* statistics = first + int64_t(num_rows) * width + r;
    const int head = item.kv_head * group + r % group;
    const Float type = args.logsums != nullptr ? Float::f32 : args.queries.type;
    const auto place = [&](int of_row) {
      return int64_t(item.first_token + of_row / group) * args.num_query_heads + item.kv_head * group +
             of_row % group;
    };
    if (r + kRowsAhead < num_rows)
      ask_row<true>(args.out, type, place(r + kRowsAhead) * format.dim, format.dim);
    const float sink = args.sinks != nullptr ? args.sinks[head] * kLog2E : kLowest;
    float top = sink;
    for (int p = 0; p < item.num_partials; ++p) top = std::max(top, statistics[p * stride]);
    float sum = args.sinks != nullptr ? scalar_exp2(sink - top) : 0.0f;
    std::fill(total, total + width, 0.0f);
    for (int p = 0; p < item.num_partials; ++p) {
      const float weight = scalar_exp2(statistics[p * stride] - top);
      sum += weight * statistics[p * stride + num_rows];
      for (int i = 0; i < width; i += kLanes)
        store(total + i, load(total + i) + load(accumulator + p * stride + i) * weight);
    }
    const float factor = sum == 0 ? 0.0f : 1.0f / sum;  // a row that sees nothing of this pool
    for (int i = 0; i < width; i += kLanes) store(total + i, load(total + i) * factor);
    to_natural(total, row);
    if (format.rotated) hadamard(row, format.dim);
    const int64_t at = place(r);
    store_floats(args.out, type, size_t(at * format.dim), format.dim, row);
    if (args.logsums != nullptr) args.logsums[at] = sum == 0 ? kLowest : top + std::log2(sum);
  }
}

}  // namespace
}  // namespace octavo
