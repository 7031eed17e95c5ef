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

// A part of a row's sums joins those of the parts before it. The same code for all who fold, so that the
// compiler fuses the same operations.
[[gnu::noinline]] void fold_part(const float* accumulator, int width, float maximum, float sum, float* total,
                                 float& total_maximum, float& total_sum) {
  const float top = std::max(total_maximum, maximum);
  const float before = scalar_exp2(total_maximum - top), weight = scalar_exp2(maximum - top);
  total_sum = total_sum * before + weight * sum;
  for (int i = 0; i < width; i += kLanes)
    store(total + i, load(total + i) * before + load(accumulator + i) * weight);
  total_maximum = top;
}

// Fold the partials of one item's rows, in order, and the sinks once, undo the rotation of V and write the
// output. `to_natural(accumulator, row)` copies an accumulator of `width` floats to the order
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
    float top = kLowest, sum = 0;
    const bool folded = item.num_partials > 1;
    if (folded) std::fill(total, total + width, 0.0f);
    for (int p = 0; folded && p < item.num_partials; ++p)
      fold_part(accumulator + p * stride, width, statistics[p * stride], statistics[p * stride + num_rows],
                total, top, sum);
    if (!folded) {  // what folding it into nothing gives, sooner: 0 + x
      top = statistics[0];
      sum = statistics[num_rows];
    }
    const float* const parts = folded ? total : accumulator;
    float weight = 1;  // of what the positions gave
    if (args.sinks != nullptr) {
      const float sink = args.sinks[head] * kLog2E, of_positions = top;
      top = std::max(top, sink);
      weight = scalar_exp2(of_positions - top);
      sum = sum * weight + scalar_exp2(sink - top);
    }
    const float factor = sum == 0 ? 0.0f : weight / sum;  // a row that sees nothing of this pool
    for (int i = 0; i < width; i += kLanes) store(total + i, (load(parts + i) + 0.0f) * factor);
    to_natural(total, row);
    if (format.rotated) hadamard(row, format.dim);
    const int64_t at = place(r);
    store_floats(args.out, type, size_t(at * format.dim), format.dim, row);
    if (args.logsums != nullptr) args.logsums[at] = sum == 0 ? kLowest : top + std::log2(sum);
  }
}

}  // namespace
}  // namespace octavo
