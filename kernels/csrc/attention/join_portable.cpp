// Attention over two pools: what each gave is weighted by its share of the weights, and sinks are folded in.
#include <algorithm>
#include <cmath>

#include "attention/attention.h"
#include "attention/vectors.h"

namespace octavo::OCTAVO_ISA {

void join(const JoinArgs& args, int first_row, int end_row) {
  constexpr int kBlock = 64;
  alignas(64) float block[kBlock];
  for (int row = first_row; row < end_row; ++row) {
    const float first = args.logsums[0][row], second = args.logsums[1][row];
    const float sink = args.sinks != nullptr ? args.sinks[row % args.num_query_heads] * kLog2E : kLowest;
    const float top = std::max(std::max(first, second), sink);
    const float a = std::exp2(first - top), b = std::exp2(second - top);
    const float sum = a + b + (args.sinks != nullptr ? std::exp2(sink - top) : 0.0f);
    const float of_first = a / sum, of_second = b / sum;
    const std::size_t at = static_cast<std::size_t>(row) * args.dim;
    for (int done = 0; done < args.dim; done += kBlock) {
      const int count = std::min(kBlock, args.dim - done);
      const float *const x = args.rows[0] + at + done, *const y = args.rows[1] + at + done;
      for (int i = 0; i < count; ++i) block[i] = x[i] * of_first + y[i] * of_second;
      store_floats(args.out, args.type, at + done, count, block);
    }
  }
}

}  // namespace octavo::OCTAVO_ISA
