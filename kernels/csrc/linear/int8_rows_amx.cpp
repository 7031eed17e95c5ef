// Affine weights of 8 and 4 bits on AMX tiles, in integers, for many rows. Scales are applied as in
// avx512::linear_integer.
//
// Sums are computed for 16 rows by 16 outputs at a time, in float32 in 16 vector registers over all groups.
// While vectors apply the scales of one group, tiles multiply a later group. Only one tile of results is
// computed at a time, because applying scales is the bottleneck, and the float32 sums of two by two tiles
// would pass through memory for every group. Several panels are laid out in tile order together, so that rows
// are read once for all these panels.
#include "linear/amx_tiles.h"
#include "linear/int8_avx512.h"
#include "runtime/unrolled.h"

namespace octavo::amx {
namespace {

constexpr int kStepCodes = 64;  // most inputs in a tile of activations
constexpr int kTileOutputs = 16;
constexpr int kColumns = kPanel / kTileOutputs;  // column tiles per panel
constexpr int kDots = kTileRows * kTileOutputs;
constexpr int kRunPanels = 16;  // most panels by which rows are multiplied before the next rows
constexpr std::size_t kRunBytes = 1024 * 1024;  // most bytes of these panels, which stay in L2

// Largest group for which integer sums become floats without a conversion, which would compete with the
// products. Instead, sums are added to the bits of 1.5 * 2^23, which is exact for |sum| <= 2^22.
constexpr int kMaxGroup = 128;
static_assert(kMaxGroup * 127 * 255 <= 1 << 22, "a group's sum must be exact when it is added to kFloatBits");
constexpr int32_t kFloatBits = 0x4b400000;
constexpr float kFloatStart = 0x1.8p23f;
constexpr float kLargestScale = 0x1p100f;  // larger scales times kFloatStart might not be finite

// A panel in tile order: codes in bytes, [4][groups][group / 4][16][4]; scales and biases in float32,
// [4][groups][2][16].
struct Panel {
  const uint8_t* codes;
  const float* parameters;
  bool exact_start;  // whether scale * kFloatStart is exact for all scales
};

std::size_t prepared_bytes(const PackedShape& shape) {
  return static_cast<std::size_t>(kPanel) * (shape.inputs + 2 * sizeof(float) * shape.num_groups());
}

// Writes the codes of a group as [4][group / 4][16][4]; the four column blocks are `column_bytes` apart.
template <int kBits>
void lay_out(const uint8_t* words, int group, std::size_t column_bytes, uint8_t* out) {
  const __m512i low_half = _mm512_set1_epi8(15);
  for (int k = 0; k < group; k += 32 / kBits, words += 4 * kPanel, out += 512 / kBits)
    for (int c = 0; c < kColumns; ++c) {
      const __m512i codes = _mm512_loadu_si512(words + 64 * c);
      uint8_t* const to = out + column_bytes * c;
      if constexpr (kBits == 8) {
        _mm512_store_si512(to, codes);
      } else {
        _mm512_store_si512(to, _mm512_and_si512(codes, low_half));
        _mm512_store_si512(to + 64, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low_half));
      }
    }
}

Panel prepare_panel(const PackedShape& shape, const uint8_t* block, uint8_t* scratch) {
  const int groups = shape.num_groups();
  const std::size_t column_bytes = static_cast<std::size_t>(shape.inputs) * kTileOutputs;
  float* const parameters = reinterpret_cast<float*>(scratch + kColumns * column_bytes);
  __m512 largest = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g, block += shape.block_bytes()) {
    const uint8_t* const from = block + shape.code_bytes();
    for (int c = 0; c < kColumns; ++c) {
      float* const to = parameters + (static_cast<std::size_t>(groups) * c + g) * 2 * kTileOutputs;
      const __m512 scale = load16(from, shape.scale_type, c * kTileOutputs);
      _mm512_store_ps(to, scale);
      _mm512_store_ps(to + kTileOutputs, load16(from, shape.scale_type, kPanel + c * kTileOutputs));
      largest = _mm512_max_ps(largest, _mm512_abs_ps(scale));
    }
    uint8_t* const codes = scratch + static_cast<std::size_t>(shape.group) * kTileOutputs * g;
    if (shape.bits == 4) lay_out<4>(block, shape.group, column_bytes, codes);
    else lay_out<8>(block, shape.group, column_bytes, codes);
  }
  const bool exact_start = shape.scale_type != Float::f32 && _mm512_reduce_max_ps(largest) <= kLargestScale;
  return {scratch, parameters, exact_start};
}

// Computes dots[16][16] of a group. Even and odd groups use different AMX tiles, chosen by template arguments
// because the intrinsics need literal numbers.
template <int kSteps, bool kOdd>
inline __attribute__((always_inline)) void multiply_group(const int8_t* x, int group, const uint8_t* codes,
                                                          int32_t* dots) {
  if constexpr (kOdd) _tile_zero(1);
  else _tile_zero(0);
  unrolled<kSteps>([&](auto step) __attribute__((always_inline)) {
    if constexpr (kOdd) {
      _tile_loadd(5, x + step * kStepCodes, group);
      _tile_loadd(7, codes + step * kStepCodes * kTileOutputs, 64);
      _tile_dpbsud(1, 5, 7);
    } else {
      _tile_loadd(4, x + step * kStepCodes, group);
      _tile_loadd(6, codes + step * kStepCodes * kTileOutputs, 64);
      _tile_dpbsud(0, 4, 6);
    }
  });
  if constexpr (kOdd) _tile_stored(1, dots, 64);
  else _tile_stored(0, dots, 64);
}

// Operands of one tile of results: codes and parameters, beginning with the first group.
struct TileCall {
  const int8_t* x;
  const float* x_scales;
  const uint8_t* codes;
  const float* parameters;
  int groups, group;
};

// Computes 16 outputs of to[16][64]: sums over all groups, bit-identical to sums by add_products.
template <int kSteps, bool kExactStart>
__attribute__((noinline)) void multiply_tile(const TileCall& call, float* to) {
  constexpr int kAhead = 2;  // groups whose integer products are computed ahead
  alignas(64) int32_t dots[2 * kAhead][kDots];
  const int groups = call.groups, group = call.group, group_bytes = group * kTileRows;
  const int8_t* x = call.x;
  const uint8_t* codes = call.codes;
  const float *x_scales = call.x_scales, *parameters = call.parameters;
  __m512 sums[kTileRows];
  unrolled<kTileRows>([&](auto m) __attribute__((always_inline)) { sums[m] = _mm512_setzero_ps(); });
  finish_stores();  // stores of activations, weights and the tile configuration
  const auto multiply = [&](int g) __attribute__((always_inline)) {
    if (g % 2 == 0) multiply_group<kSteps, false>(x, group, codes, dots[g % (2 * kAhead)]);
    else multiply_group<kSteps, true>(x, group, codes, dots[g % (2 * kAhead)]);
    x += group_bytes;
    codes += group_bytes;
  };
  for (int g = 0; g < kAhead && g < groups; ++g) multiply(g);
  for (int g = 0; g < groups; ++g, parameters += 2 * kTileOutputs, x_scales += 2 * kTileRows) {
    if (g + kAhead < groups) multiply(g + kAhead);
    const int32_t* const from = dots[g % (2 * kAhead)];
    const __m512 scale = _mm512_load_ps(parameters), bias = _mm512_load_ps(parameters + kTileOutputs);
    const __m512 start = _mm512_mul_ps(scale, _mm512_set1_ps(-kFloatStart));
    unrolled<kTileRows>([&](auto m) __attribute__((always_inline)) {
      const __m512i dot = _mm512_load_si512(from + m * kTileOutputs);
      __m512 product;
      if constexpr (kExactStart) {
        const __m512i bits = _mm512_add_epi32(dot, _mm512_set1_epi32(kFloatBits));
        product = _mm512_fmadd_ps(_mm512_castsi512_ps(bits), scale, start);
      } else {
        product = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale);
      }
      sums[m] = _mm512_fmadd_ps(product, _mm512_set1_ps(x_scales[m]), sums[m]);
      sums[m] = _mm512_fmadd_ps(bias, _mm512_set1_ps(x_scales[kTileRows + m]), sums[m]);
    });
  }
  unrolled<kTileRows>([&](auto m)
                          __attribute__((always_inline)) { _mm512_storeu_ps(to + m * kPanel, sums[m]); });
}

void multiply(const TileCall& call, bool exact_start, float* to) {
  if (call.group <= kStepCodes) {
    if (exact_start) multiply_tile<1, true>(call, to);
    else multiply_tile<1, false>(call, to);
  } else {
    if (exact_start) multiply_tile<2, true>(call, to);
    else multiply_tile<2, false>(call, to);
  }
}

// Multiplies each tile of rows by panels [first, last).
void run_panels(const LinearCall& call, const Int8Rows& x, int first, int last) {
  const PackedShape& shape = call.weight->shape;
  const std::size_t bytes = prepared_bytes(shape);
  uint8_t* const scratch = static_cast<uint8_t*>(thread_scratch(bytes * (last - first)));
  Panel panels[kRunPanels];
  for (int panel = first; panel < last; ++panel)
    panels[panel - first] =
        prepare_panel(shape, call.weight->panel(panel), scratch + bytes * (panel - first));
  alignas(64) float sums[kTileRows * kPanel];
  Tiles tiles;
  tiles.configure(kTileRows, std::min(shape.group, kStepCodes));
  const std::size_t column_bytes = static_cast<std::size_t>(shape.inputs) * kTileOutputs;
  const std::size_t column_parameters = static_cast<std::size_t>(x.blocks) * 2 * kTileOutputs;
  for (int tile = 0; tile * kTileRows < call.rows; ++tile) {
    const int row = tile * kTileRows, rows = std::min(call.rows - row, kTileRows);
    for (int panel = first; panel < last; ++panel) {
      const Panel& weights = panels[panel - first];
      for (int c = 0; c < kColumns; ++c) {
        const TileCall tile_call{x.at(0, row),
                                 x.scales_at(0, row),
                                 weights.codes + column_bytes * c,
                                 weights.parameters + column_parameters * c,
                                 x.blocks,
                                 x.block};
        multiply(tile_call, weights.exact_start, sums + c * kTileOutputs);
      }
      finish_rows(call, panel, row, rows, sums);
    }
  }
}

}  // namespace

void linear_int8_rows(const LinearCall& call) {
  constexpr int kRunsPerThread = 2;
  const PackedShape& shape = call.weight->shape;
  const Int8Rows x = quantize_rows(call, shape.group, kTileRows);
  const int partner = call.partner(), panels = shape.num_panels() - partner,
            share = panels / (kRunsPerThread * num_threads());
  const int most = std::min(kRunPanels, static_cast<int>(kRunBytes / prepared_bytes(shape)));
  const int run = std::max(1, std::min(share, most));
  parallel_for((panels + run - 1) / run, [&](int item) {
    const int first = item * run, last = std::min(panels, first + run);
    run_panels(call, x, first, last);
    if (partner > 0) run_panels(call, x, first + partner, last + partner);
  });
}

}  // namespace octavo::amx
