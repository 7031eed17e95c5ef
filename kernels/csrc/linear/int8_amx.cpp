// Affine weights of 8 and 4 bits on AMX tiles, in integers.
//
// Codes of 8 bits are what tiles want as they lie in a panel; those of 4 bits are spread to bytes first,
// group by group, or for all rows at once where there are many. Sums of a group are exact, and scales are
// applied as avx512::linear_int8 does.
#include "linear/amx_tiles.h"
#include "linear/int8_avx512.h"

namespace octavo::amx {
namespace {

constexpr int kItemRows = 256;
constexpr int kStepCodes = 64;          // inputs of one tile of activations
constexpr int kQuadBytes = 4 * kPanel;  // four inputs of a panel

// Activations of up to 32 rows, from the first input of a group on.
struct CodeBlock {
  const int8_t* x;
  std::size_t stride;  // bytes from row to row
  int upper, lower;    // rows of the two tiles
  int group;

  int step() const { return group < kStepCodes ? group : kStepCodes; }
};

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

// dots[rows][64] of up to 16 rows: all four columns of tiles at once.
void multiply_upper(const CodeBlock& block, const uint8_t* codes, int32_t* dots) {
  start_sums(true, nullptr, nullptr, nullptr, nullptr);
  for (int k = 0; k < block.group; k += block.step(), codes += kStepCodes / 4 * kQuadBytes) {
    _tile_loadd(4, block.x + k, block.stride);
    _tile_loadd(6, codes, kQuadBytes);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, codes + 64, kQuadBytes);
    _tile_dpbsud(1, 4, 7);
    _tile_loadd(6, codes + 128, kQuadBytes);
    _tile_dpbsud(2, 4, 6);
    _tile_loadd(7, codes + 192, kQuadBytes);
    _tile_dpbsud(3, 4, 7);
  }
  _tile_stored(0, dots, kPairBytes);
  _tile_stored(1, dots + 16, kPairBytes);
  _tile_stored(2, dots + 32, kPairBytes);
  _tile_stored(3, dots + 48, kPairBytes);
}

// The same of 17 to 32 rows: two by two tiles, the two halves of the panel in turn.
void multiply_both(const CodeBlock& block, const uint8_t* codes, int32_t* dots) {
  const int8_t* lower_x = block.x + kTileRows * block.stride;
  for (int half = 0; half < 2; ++half) {
    int32_t* upper = dots + 32 * half;
    int32_t* lower = upper + kTileRows * kPanel;
    const uint8_t* w = codes + 128 * half;
    start_sums(true, nullptr, nullptr, nullptr, nullptr);
    for (int k = 0; k < block.group; k += block.step(), w += kStepCodes / 4 * kQuadBytes) {
      _tile_loadd(4, block.x + k, block.stride);
      _tile_loadd(6, w, kQuadBytes);
      _tile_dpbsud(0, 4, 6);
      _tile_loadd(7, w + 64, kQuadBytes);
      _tile_dpbsud(1, 4, 7);
      _tile_loadd(5, lower_x + k, block.stride);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, upper, kPairBytes);
    _tile_stored(1, upper + 16, kPairBytes);
    _tile_stored(2, lower, kPairBytes);
    _tile_stored(3, lower + 16, kPairBytes);
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
      const CodeBlock x_block{from, static_cast<std::size_t>(shape.inputs), upper, rows - upper, shape.group};
      if (spreads && !shared) spread(block(g), shape.group, spread_codes);
      const uint8_t* codes = !spreads ? block(g) : shared ? spread_codes + group_bytes * g : spread_codes;
      if (x_block.lower > 0) multiply_both(x_block, codes, dots);
      else multiply_upper(x_block, codes, dots);
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
