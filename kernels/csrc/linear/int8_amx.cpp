// Affine weights of 8 and 4 bits on AMX tiles, in integers.
//
// Codes of 8 bits are what tiles want as they lie in a panel; those of 4 bits are spread to bytes first,
// group by group, or for all rows at once where there are many. Sums of a group are exact, and scales are
// applied as avx512::linear_int8 does.
#include "linear/amx_codes.h"
#include "linear/int8_avx512.h"

namespace octavo::amx {
namespace {

constexpr int kItemRows = 256;

// 4-bit codes of a group as bytes [group / 4][64][4].
void spread(const uint8_t* words, int group, uint8_t* out) {
  const __m512i low_half = _mm512_set1_epi8(15);
  for (int k = 0; k < group; k += 8, words += kQuadBytes, out += 2 * kQuadBytes)
    for (int c = 0; c < kQuadBytes; c += 64) {
      const __m512i codes = _mm512_loadu_si512(words + c);
      _mm512_store_si512(out + c, _mm512_and_si512(codes, low_half));
      _mm512_store_si512(out + c + kQuadBytes, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_half));
    }
}

// sums[rows][64] += one group's products of rows [first, first + rows).
void apply_scales(const PackedShape& shape, const uint8_t* parameters, const int32_t* dots, const Int8Rows& x,
                  int first, int rows, int group, float* sums) {
  const std::size_t groups = shape.num_groups();
  for (int c = 0; c < kPanel; c += 16) {
    const __m512 scale = load16(parameters, shape.scale_type, c);
    const __m512 bias = load16(parameters, shape.scale_type, kPanel + c);
    for (int m = 0; m < rows; ++m) {
      const std::size_t i = (first + m) * groups + group;
      add_products(_mm512_loadu_si512(dots + m * kPanel + c), scale, bias, x.scales[i], x.code_sums[i],
                   sums + m * kPanel + c);
    }
  }
}

void run_item(const LinearCall& call, const Int8Rows& x, const Item& item) {
  const PackedShape& shape = call.weight->shape;
  const int num_groups = shape.num_groups();
  const std::size_t group_bytes = static_cast<std::size_t>(shape.group) * kPanel;
  const bool spreads = shape.bits == 4, shared = spreads && item.last - item.first > kBlockRows;
  uint8_t* spread_codes =
      static_cast<uint8_t*>(thread_scratch(shared ? group_bytes * num_groups : group_bytes));
  const uint8_t* panel = call.weight->panel(item.panel);
  const auto block = [&](int g) { return panel + shape.block_bytes() * g; };
  if (shared)
    for (int g = 0; g < num_groups; ++g) spread(block(g), shape.group, spread_codes + group_bytes * g);
  Tiles tiles;
  for_blocks(item, [&](int first, int last) {
    alignas(64) float sums[kBlockRows * kPanel];
    alignas(64) int32_t dots[kBlockRows * kPanel];
    const int rows = last - first, upper = rows < kTileRows ? rows : kTileRows;
    std::memset(sums, 0, sizeof(float) * kPanel * rows);
    tiles.configure(upper, rows - upper, shape.group < kStepCodes ? shape.group : kStepCodes);
    for (int g = 0; g < num_groups; ++g) {
      const int8_t* from = x.codes + static_cast<std::size_t>(first) * shape.inputs + g * shape.group;
      if (spreads && !shared) spread(block(g), shape.group, spread_codes);
      const uint8_t* codes = !spreads ? block(g) : shared ? spread_codes + group_bytes * g : spread_codes;
      const CodeSteps steps{from, static_cast<std::size_t>(shape.inputs), codes, shape.group};
      multiply_codes(steps, rows > upper, dots);
      apply_scales(shape, block(g) + shape.code_bytes(), dots, x, first, rows, g, sums);
    }
    finish_rows(call, item.panel, first, rows, sums);
  });
}

}  // namespace

void linear_int8(const LinearCall& call) {
  const Int8Rows x = quantize_rows(call, call.weight->shape.group);
  const Items items(call, item_rows(call, kItemRows));
  for_items(items, [&](const Item& item) { run_item(call, x, item); });
}

}  // namespace octavo::amx
