// Affine weights of 8 and 4 bits on AMX tiles, for activations that must stay bf16.
//
// Codes (0..255) are exact in bf16. They are expanded group by group, multiplied as they are, and each
// group's scale and bias are applied to its float32 sums:
//
//   y = sum over groups of  s (q . x)  +  b sum(x)
//
// so that no precision is lost beyond the activations' own. Every row goes the same way whatever the
// number of rows.
#include "linear/amx_tiles.h"

namespace octavo::amx {
namespace {

constexpr int kItemRows = 256;

inline void prefetch(const uint8_t* p, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64)
    _mm_prefetch(reinterpret_cast<const char*>(p + at), _MM_HINT_T1);
}

// Expand a group of 4-bit codes to bf16 pairs [group / 2][64][2]. A word holds eight inputs of one
// output; VPERMW looks up the low four bits of each half word (the fifth bit is ignored by doubling
// the table), which pairs inputs (0, 2), (4, 6), (1, 3), (5, 7) of the eight.
void expand_q4(const uint8_t* words, int group, uint8_t* out) {
  alignas(64) static const bf16_t kValues[32] = {
      0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
      0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
      0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};  // 0..15, twice
  const __m512i table = _mm512_load_si512(kValues);
  for (int k = 0; k < group; k += 8, words += kPairBytes, out += 4 * kPairBytes)
#pragma GCC unroll 4
    for (int c = 0; c < kPairBytes; c += 64) {
      const __m512i codes = _mm512_loadu_si512(words + c);
      const __m512i p0 = _mm512_permutexvar_epi16(codes, table);
      const __m512i p1 = _mm512_permutexvar_epi16(_mm512_srli_epi32(codes, 4), table);
      const __m512i p2 = _mm512_permutexvar_epi16(_mm512_srli_epi32(codes, 8), table);
      const __m512i p3 = _mm512_permutexvar_epi16(_mm512_srli_epi32(codes, 12), table);
      _mm512_store_si512(out + c, p0);
      _mm512_store_si512(out + c + kPairBytes, p1);
      _mm512_store_si512(out + c + 2 * kPairBytes, p2);
      _mm512_store_si512(out + c + 3 * kPairBytes, p3);
    }
}

// The same for bytes: inputs (0, 1) and (2, 3) of the four in a word. An integer below 256 leaves the
// lower half of its float32 zero, so that cutting it off is exact.
void expand_q8(const uint8_t* words, int group, uint8_t* out) {
  const __m512i byte = _mm512_set1_epi32(255);
  const auto convert = [](__m512i value) { return _mm512_castps_si512(_mm512_cvtepi32_ps(value)); };
  for (int k = 0; k < group; k += 4, words += kPairBytes, out += 2 * kPairBytes)
#pragma GCC unroll 4
    for (int c = 0; c < kPairBytes; c += 64) {
      const __m512i codes = _mm512_loadu_si512(words + c);
      const __m512i k0 = convert(_mm512_and_si512(codes, byte));
      const __m512i k1 = convert(_mm512_and_si512(_mm512_srli_epi32(codes, 8), byte));
      const __m512i k2 = convert(_mm512_and_si512(_mm512_srli_epi32(codes, 16), byte));
      const __m512i k3 = convert(_mm512_srli_epi32(codes, 24));
      _mm512_store_si512(out + c, _mm512_or_si512(_mm512_srli_epi32(k0, 16), k1));
      _mm512_store_si512(out + c + kPairBytes, _mm512_or_si512(_mm512_srli_epi32(k2, 16), k3));
    }
}

// Activations in the order expand_* leaves the inputs in, and their sums per group [rows, groups].
struct Grouped {
  Activations x;
  const float* sums;
  std::size_t groups;
};

void prepare_row(const LinearCall& call, int row, bf16_t* tiles, float* sums) {
  alignas(64) static const uint16_t kEvensFirst[32] = {0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12,
                                                       14, 9,  11, 13, 15, 16, 18, 20, 22, 17, 19,
                                                       21, 23, 24, 26, 28, 30, 25, 27, 29, 31};
  const PackedShape& shape = call.weight->shape;
  const __m512i order = _mm512_load_si512(kEvensFirst);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const std::size_t start = static_cast<std::size_t>(row) * shape.inputs;
  for (int g = 0; g < shape.num_groups(); ++g) {
    __m512 sum = _mm512_setzero_ps();
    for (int k = g * shape.group; k < (g + 1) * shape.group; k += kTileInputs) {
      __m512i x = load32_bf16(call.x, call.x_type, start + k);
      sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)));
      sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_and_si512(x, upper)));
      if (shape.bits == 4) x = _mm512_permutexvar_epi16(order, x);
      _mm512_storeu_si512(tiled_place(tiles, shape.inputs, row, k / kTileInputs), x);
    }
    sums[g] = _mm512_reduce_add_ps(sum);
  }
}

Grouped prepare_rows(const LinearCall& call) {
  const PackedShape& shape = call.weight->shape;
  const std::size_t groups = shape.num_groups();
  const std::size_t x_bytes = tiled_rows(call.rows) * shape.inputs * sizeof(bf16_t);
  uint8_t* scratch = static_cast<uint8_t*>(thread_scratch(x_bytes + sizeof(float) * call.rows * groups, 1));
  bf16_t* tiles = reinterpret_cast<bf16_t*>(scratch);
  float* sums = reinterpret_cast<float*>(scratch + x_bytes);
  const auto prepare = [&](int row) { prepare_row(call, row, tiles, sums + row * groups); };
  if (call.rows >= 32) parallel_for(call.rows, prepare);
  else
    for (int row = 0; row < call.rows; ++row) prepare(row);
  return {{tiles, static_cast<std::size_t>(shape.inputs), true}, sums, groups};
}

// sums += scale * dots + bias * sum of the group's activations, for rows of 64 outputs.
void apply_scales(const PackedShape& shape, const uint8_t* parameters, const float* dots, const float* x_sums,
                  std::size_t x_stride, int rows, float* sums) {
  __m512 scale[4], bias[4];
  for (int c = 0; c < 4; ++c) {
    scale[c] = load16(parameters, shape.scale_type, 16 * c);
    bias[c] = load16(parameters, shape.scale_type, kPanel + 16 * c);
  }
  for (int m = 0; m < rows; ++m, dots += kPanel, sums += kPanel) {
    const __m512 x_sum = _mm512_set1_ps(x_sums[m * x_stride]);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      __m512 sum = _mm512_fmadd_ps(bias[c], x_sum, _mm512_loadu_ps(sums + 16 * c));
      sum = _mm512_fmadd_ps(scale[c], _mm512_loadu_ps(dots + 16 * c), sum);
      _mm512_storeu_ps(sums + 16 * c, sum);
    }
  }
}

void expand(const PackedShape& shape, const uint8_t* block, uint8_t* out) {
  if (shape.bits == 4) expand_q4(block, shape.group, out);
  else expand_q8(block, shape.group, out);
}

// One block of rows passes group by group, so that nothing but weights leaves the first-level cache:
// each group is expanded just before it is used, and the next is fetched meanwhile. If there are more
// blocks, the whole panel is expanded first, into the second-level cache.
void run_item(const LinearCall& call, const Grouped& grouped, const Item& item) {
  const PackedShape& shape = call.weight->shape;
  const int num_groups = shape.num_groups(), group_steps = shape.group / kTileInputs;
  const std::size_t group_bytes = static_cast<std::size_t>(group_steps) * kStepBytes;
  const bool shared = item.last - item.first > kBlockRows;
  uint8_t* expanded = static_cast<uint8_t*>(thread_scratch(shared ? group_bytes * num_groups : group_bytes));
  const uint8_t* panel = call.weight->panel(item.panel);
  const auto block = [&](int g) { return panel + shape.block_bytes() * g; };
  if (shared)
    for (int g = 0; g < num_groups; ++g) expand(shape, block(g), expanded + group_bytes * g);
  Tiles tiles;
  for_blocks(item, [&](int first, int last) {
    alignas(64) float sums[kBlockRows * kPanel], dots[kBlockRows * kPanel];
    const Block rows = grouped.x.block(first, last);
    std::memset(sums, 0, sizeof(float) * kPanel * (last - first));
    tiles.configure(rows.upper, rows.lower);
    for (int g = 0; g < num_groups; ++g) {
      if (!shared) {
        expand(shape, block(g), expanded);
        prefetch(block(g + 1), shape.block_bytes());
      }
      const uint8_t* weights = shared ? expanded + group_bytes * g : expanded;
      multiply(rows, weights, g * group_steps, group_steps, dots);
      apply_scales(shape, call.weight->parameters(item.panel, g), dots,
                   grouped.sums + first * grouped.groups + g, grouped.groups, last - first, sums);
    }
    finish_rows(call, item.panel, first, last - first, sums);
  });
}

}  // namespace

void linear_quantized(const LinearCall& call) {
  const Grouped grouped = prepare_rows(call);
  const Items items(call, item_rows(call, kItemRows));
  for_items(items, [&](const Item& item) { run_item(call, grouped, item); });
}

}  // namespace octavo::amx
