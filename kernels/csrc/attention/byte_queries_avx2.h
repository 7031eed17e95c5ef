// Queries in 8-bit fixed point of their row's largest element, for products of bytes.
//
// Their sums of 16-bit lanes run over kRun dims: 8 products of at most 28 * 127.
#pragma once

#include <algorithm>

#include "attention/bytes_avx2.h"
#include "attention/rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLargestByte = 127;
constexpr int kRun = 2 * kChunk;
static_assert(8 * Fp5::kLargestValue * kLargestByte <= INT16_MAX && Fp5::kLargestValue > Fp4::kLargestValue);

// int8 rows in the order of the expanded chunks; of each row and run, 16 biases; then a factor per row.
struct Queries {
  int8_t* rows;
  int16_t* biases;
  float* factors;

  Queries(void* memory, int dim, int num_rows)
      : rows(static_cast<int8_t*>(memory)),
        biases(reinterpret_cast<int16_t*>(rows + size_t(num_rows) * dim)),
        factors(reinterpret_cast<float*>(biases + size_t(num_rows) * num_runs(dim) * 16)) {}

  static int num_runs(int dim) { return (dim + kRun - 1) / kRun; }
};

size_t query_bytes(int dim, int num_rows) {
  return size_t(num_rows) * (dim + 32 * Queries::num_runs(dim) + 4);
}

// The largest magnitude of a row; NaNs do not count.
float largest_of(const float* row, int dim) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 top = _mm256_setzero_ps();
  for (int d = 0; d < dim; d += 8) top = _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(row + d)), top);
  return largest_lane(top);
}

template <class Code>
void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const RowFormat& format = args.layout.k;
  const int group = group_size(args), num_rows = item.num_tokens * group, dim = format.dim;
  const Queries queries(memory, dim, num_rows);
  std::fill(queries.biases, queries.biases + num_rows * Queries::num_runs(dim) * 16, int16_t(0));
  alignas(64) float row[kMaxDim];
  for (int r = 0; r < num_rows; ++r) {
    load_row(args.queries, item.first_token + r / group, item.kv_head * group + r % group, dim, row);
    if (format.rotated) hadamard(row, dim);
    const float largest = largest_of(row, dim);
    const __m256 to_fixed = _mm256_set1_ps(largest > 1e-30f ? kLargestByte / largest : 0.0f);
    alignas(32) int32_t fixed[kMaxDim];
    for (int d = 0; d < dim; d += 8)
      store256(fixed + d, _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(row + d), to_fixed)));
    for (int d = 0; d < dim; d += kChunk) {
      int8_t* const to = queries.rows + size_t(r) * dim + d;
      int16_t* const biases = queries.biases + (size_t(r) * Queries::num_runs(dim) + d / kRun) * 16;
      for (int i = 0; i < 32; ++i)
        to[i] = int8_t(fixed[d + 2 * i]), to[32 + i] = int8_t(fixed[d + 2 * i + 1]);
      for (int lane = 0; lane < 16; ++lane) {
        const int32_t* four = fixed + d + 4 * lane;
        biases[lane] = int16_t(biases[lane] - (four[0] + four[1] + four[2] + four[3]) * Code::kLargestValue);
      }
    }
    queries.factors[r] = largest / (kLargestByte * Code::kScale);
  }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
