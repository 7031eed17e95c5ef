// The end of a softmax, which turns partial results of divided position ranges into output rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention/attention.h"
#include "attention/rows.h"
#include "runtime/vectors.h"

namespace octavo {
namespace {

// Adds a part of a row's sums to the total of earlier parts, relative to the larger of both maxima. Not
// inlined, so that the compiler fuses the same multiply-adds for all callers.
[[gnu::noinline]] void fold_part(const float* accumulator, int width, float maximum, float sum, float* total,
                                 float& total_maximum, float& total_sum) {
  const float top = std::max(total_maximum, maximum);
  const float before = scalar_exp2(total_maximum - top), weight = scalar_exp2(maximum - top);
  total_sum = total_sum * before + weight * sum;
  for (int i = 0; i < width; i += kLanes)
    store(total + i, load(total + i) * before + load(accumulator + i) * weight);
  total_maximum = top;
}

// Joins a row with the same row of another pool, and adds sinks. Not inlined, so that the compiler fuses the
// same multiply-adds for all callers.
[[gnu::noinline]] void join_rows(const FloatRows& others, int64_t other, float maximum, float sum,
                                 const float* sink, int dim, float* row) {
  const float of_sink = sink != nullptr ? *sink * kLog2E : kLowest;
  const float top = std::max(std::max(others.maxima[other], maximum), of_sink);
  const float of_other = scalar_exp2(others.maxima[other] - top), of_this = scalar_exp2(maximum - top);
  float total = of_other * others.sums[other] + of_this * sum;
  if (sink != nullptr) total += scalar_exp2(of_sink - top);
  const float factor = total == 0 ? 0.0f : 1 / total;  // a row without visible positions
  const float *const from = others.rows + other * dim, a = of_other * factor, b = of_this * factor;
  for (int i = 0; i < dim; ++i) row[i] = from[i] * a + row[i] * b;
}

// Returns the index of a result's row in `out`.
inline int64_t output_row(const AttendArgs& args, int token, int head) {
  return int64_t(token) * args.num_query_heads + head;
}

// Adds up the partial results of an item's rows in order, adds sinks, undoes V's rotation and writes the
// output. `to_natural(accumulator, row)` copies an accumulator of `width` floats into the order of head dims.
template <class ToNatural>
void merge_partials(const AttendArgs& args, const MergeItem& item, const float* partials, int width,
                    ToNatural to_natural) {
  const RowFormat& format = args.layout.v;
  const int group = group_size(args), num_rows = item.num_tokens * group;
  const int64_t stride = partial_floats(args, item.num_tokens, width);
  const float* first = partials + item.partial;
  alignas(64) float total[kMaxDim + 64], row[kMaxDim + 64];
  for (int r = 0, token = item.first_token, in_group = 0; r < num_rows; ++r, ++in_group) {
    if (in_group == group) in_group = 0, ++token;
    const float* accumulator = first + int64_t(r) * width;
    const float* statistics = first + int64_t(num_rows) * width + r;
    const int head = item.kv_head * group + in_group;
    if (const int next = r + kRowsAhead; next < num_rows && !args.part)
      prefetch_row<true>(
          args.out, args.queries.type,
          output_row(args, item.first_token + next / group, item.kv_head * group + next % group) * format.dim,
          format.dim);
    float top = kLowest, sum = 0;
    const bool folded = item.num_partials > 1;
    if (folded) std::fill(total, total + width, 0.0f);
    for (int p = 0; folded && p < item.num_partials; ++p)
      fold_part(accumulator + p * stride, width, statistics[p * stride], statistics[p * stride + num_rows],
                total, top, sum);
    if (!folded) {  // faster than adding to zeros, and bit-identical to it
      top = statistics[0];
      sum = statistics[num_rows];
    }
    const float* parts = folded ? total : accumulator;
    if (!args.part && !args.other) {
      float weight = 1;  // weight of the row's own sums once a sink is added
      if (args.sinks != nullptr) {
        const float sink = args.sinks[head] * kLog2E, of_positions = top;
        top = std::max(top, sink);
        weight = scalar_exp2(of_positions - top);
        sum = sum * weight + scalar_exp2(sink - top);
      }
      const float factor = sum == 0 ? 0.0f : weight / sum;  // a row without visible positions
      for (int i = 0; i < width; i += kLanes) store(total + i, (load(parts + i) + 0.0f) * factor);
      parts = total;
    }
    to_natural(parts, row);
    if (format.rotated) hadamard(row, format.dim);
    if (args.other)
      join_rows(args.other, args.other.at(token, head), top, sum,
                args.sinks != nullptr ? args.sinks + head : nullptr, format.dim, row);
    if (args.part) {
      const int64_t at = args.part.at(token, head);
      std::memcpy(args.part.rows + at * format.dim, row, sizeof(float) * size_t(format.dim));
      args.part.maxima[at] = top;
      args.part.sums[at] = sum;
    } else {
      store_floats(args.out, args.queries.type, size_t(output_row(args, token, head) * format.dim),
                   format.dim, row);
    }
  }
}

}  // namespace
}  // namespace octavo
