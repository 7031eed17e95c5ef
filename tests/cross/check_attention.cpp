// Checks pages and paged attention of the baseline level without Python and MLX, for cross-compiled builds.
// Each page format is written, gathered and attended to, in decodes and chunks. The reference is attention in
// double over the gathered rows. The exit status is the number of failures.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "attention/attention.h"
#include "attention/plan.h"
#include "pages/codes.h"
#include "runtime/threads.h"

namespace {

using namespace octavo;

constexpr int kHeads = 2, kGroup = 3, kPages = 24, kDim = 64;

struct Format {
  const char* name;
  CodeType codes;
  int bits, scale_bytes;
  bool rotated;
  double rounding;  // largest error of a stored value, as a share of the row's largest
};

constexpr Format kFormats[] = {
    {"bf16", CodeType::bf16, 16, 0, false, 0.004},
    {"fp16", CodeType::fp16, 16, 0, false, 0.001},
    {"int8", CodeType::int8, 8, 2, false, 0.005},
    {"int4", CodeType::int4, 4, 2, true, 0.6},
    {"fp4", CodeType::fp4, 4, 2, true, 0.8},
    {"fp5", CodeType::fp5, 4, kDim / 8, true, 0.5},
    {"mxfp4", CodeType::mxfp4, 4, kDim / kMxGroup, false, 0.3},
    {"nvfp4", CodeType::nvfp4, 4, kDim / kNvGroup, false, 0.2},
    {"affine8", CodeType::affine8, 8, 4, false, 0.01},
    {"affine4", CodeType::affine4, 4, 4, false, 0.1},
};

PageLayout layout_of(const Format& format, int page_size) {
  PageLayout layout{};
  layout.num_pages = kPages;
  layout.num_heads = kHeads;
  layout.page_size = page_size;
  while (1 << layout.page_shift < page_size) ++layout.page_shift;
  layout.k = layout.v = {format.codes, kDim, format.rotated, kDim * format.bits / 8, format.scale_bytes};
  layout.k_scales = page_size * layout.k.row_bytes;
  layout.v_codes = layout.k_scales + page_size * layout.k.scale_bytes;
  layout.v_scales = layout.v_codes + page_size * layout.v.row_bytes;
  layout.head_bytes = layout.v_scales + page_size * layout.v.scale_bytes;
  return layout;
}

struct Rows {
  std::vector<float> values;
  RowsView view;

  Rows(int num_tokens, int num_heads, std::mt19937& random) : values(size_t(num_tokens) * num_heads * kDim) {
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(random);
    view = {values.data(), Float::f32, num_heads * kDim, kDim, 1};
  }
};

// Computes one query's attention to the first `visible` gathered rows [position][dim], in double.
void attend_exactly(const float* query, const float* keys, const float* values, int visible, double* out) {
  std::vector<double> weights(visible);
  double sum = 0;
  for (int t = 0; t < visible; ++t) {
    double product = 0;
    for (int d = 0; d < kDim; ++d) product += double(query[d]) * keys[t * kDim + d];
    sum += weights[t] = std::exp(product * 0.125);
  }
  for (int d = 0; d < kDim; ++d) {
    out[d] = 0;
    for (int t = 0; t < visible; ++t) out[d] += weights[t] / sum * values[t * kDim + d];
  }
}

struct Errors {
  double stored = 0, attended = 0;
};

Errors check(const Format& format, int page_size, int length, int num_rows) {
  std::mt19937 random(length);
  const PageLayout layout = layout_of(format, page_size);
  const AttentionKernels& kernels = generic::attention_kernels;
  std::vector<uint8_t> pool(size_t(kPages) * kHeads * layout.head_bytes, 0xff);  // unwritten bytes are NaN
  std::vector<int32_t> table((length + page_size - 1) / page_size), slots(length), flags(length);
  for (size_t i = 0; i < table.size(); ++i) table[i] = int32_t((5 * i + 3) % kPages);
  for (int t = 0; t < length; ++t) slots[t] = table[t / page_size] * page_size + t % page_size;
  const Rows keys(length, kHeads, random), values(length, kHeads, random);
  kernels.write({layout, pool.data(), keys.view, values.view, slots.data(), flags.data(), length}, 0, length);

  std::vector<float> k(size_t(kHeads) * length * kDim), v(k.size());
  const int32_t kv_len = length, q_start[] = {0, num_rows};
  const GatherArgs gather{layout, pool.data(), table.data(), &kv_len, int64_t(table.size()), 1, length, Float::f32,
                          k.data(), v.data()};
  for (int head = 0; head < kHeads; ++head) kernels.gather(gather, 0, head, 0, length);

  const Rows queries(num_rows, kHeads * kGroup, random);
  std::vector<float> out(queries.values.size());
  AttendArgs args{};
  args.layout = layout;
  args.pool = pool.data();
  args.queries = queries.view;
  args.out = out.data();
  args.page_table = table.data();
  args.q_start = q_start;
  args.kv_len = &kv_len;
  args.table_width = int64_t(table.size());
  args.num_sequences = 1;
  args.num_query_heads = kHeads * kGroup;
  args.scale = 0.125f;
  const AttendKernel kernel = kernels.attend_kernel(args);
  const AttendPlan plan = plan_attention(args, kernel.width);
  std::vector<float> partials(size_t(plan.partial_floats));
  for (const AttendItem& item : plan.items) kernel.attend(args, item, partials.data());
  for (const MergeItem& item : plan.merges) kernel.merge(args, item, partials.data());

  Errors errors;
  for (int t = 0; t < length; ++t)
    for (int head = 0; head < kHeads; ++head)
      for (int d = 0; d < kDim; ++d)
        errors.stored = std::max(errors.stored, std::fabs(double(keys.values[(t * kHeads + head) * kDim + d]) -
                                                           k[(head * length + t) * kDim + d]));
  for (int row = 0; row < num_rows; ++row)
    for (int head = 0; head < kHeads * kGroup; ++head) {
      double want[kDim];
      const size_t at = size_t(row * kHeads * kGroup + head) * kDim, of = size_t(head / kGroup) * length * kDim;
      attend_exactly(&queries.values[at], &k[of], &v[of], length - num_rows + row + 1, want);
      for (int d = 0; d < kDim; ++d) errors.attended = std::max(errors.attended, std::fabs(want[d] - out[at + d]));
    }
  return errors;
}

}  // namespace

int main() {
  set_threads(1);
  int failures = 0;
  for (const Format& format : kFormats)
    for (const int page_size : {4, 16, 64})
      for (const int num_rows : {1, 21}) {
        const Errors errors = check(format, page_size, page_size * 20 + 1, num_rows);
        // The largest value is about 4.
        const bool right = errors.stored < 4 * format.rounding && errors.attended < 1e-4;
        failures += !right;
        if (!right || (page_size == 16 && num_rows == 1))
          std::printf("%s %s, pages of %d, %d rows: stored to %.4f, attended to %.1e\n", right ? "ok" : "WRONG",
                      format.name, page_size, num_rows, errors.stored, errors.attended);
      }
  return failures;
}
