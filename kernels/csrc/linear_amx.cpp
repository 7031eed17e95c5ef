// AMX tiles: y = x W^T by TDPBF16PS, for bf16, q8 and q4 weights.
//
// A tile multiplication takes up to 16 rows of 32 bf16 activations and 32 inputs of 16 outputs. It is
// used for one row too: it outruns DRAM even then, and so a row's sums are the same in any batch.
//
// Codes of q8 and q4 (0..255) are exact in bf16. They are expanded a group at a time, multiplied as
// they are, and the group's scale and bias are applied to the float32 sums:
//
//   y = sum over groups of  s (q . x)  +  b sum(x)
//
// so that no precision is lost beyond the activations' own.
#include <immintrin.h>

#include "amx_tiles.h"
#include "linear_common.h"

namespace octavo::amx {
namespace {

constexpr int kTileInputs = 32;
constexpr int kBlockRows = 32;  // two tiles of rows
constexpr int kItemRows = 128;  // rows that share an expanded group
constexpr int kPairBytes = 4 * kPanel;  // a pair of inputs of a panel

// The rows of one block, as tiles want them.
struct Rows {
  const bf16_t* x;
  std::size_t stride;  // bytes from row to row
  int upper;           // rows of the first tile
  int lower;           // rows of the second, maybe 0

  Rows(const bf16_t* base, std::size_t inputs, int first, int last)
      : x(base + first * inputs),
        stride(inputs * sizeof(bf16_t)),
        upper(last - first < kTileRows ? last - first : kTileRows),
        lower(last - first - upper) {}
};

// sums[16][64] = up to 16 rows times `steps` * 32 inputs of all four column tiles.
void multiply_upper(const Rows& rows, const uint8_t* weights, int k, int steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; ++step, k += kTileInputs, weights += 16 * kPairBytes) {
    _tile_loadd(4, rows.x + k, rows.stride);
    _tile_loadd(6, weights, kPairBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + 64, kPairBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, weights + 128, kPairBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, weights + 192, kPairBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, sums, kPairBytes);
  _tile_stored(1, sums + 16, kPairBytes);
  _tile_stored(2, sums + 32, kPairBytes);
  _tile_stored(3, sums + 48, kPairBytes);
}

// sums[32][64] = 17 to 32 rows: two by two tiles, the two halves of the panel in turn.
void multiply_both(const Rows& rows, const uint8_t* weights, int k, int steps, float* sums) {
  const bf16_t* lower_x = rows.x + kTileRows * (rows.stride / sizeof(bf16_t));
  for (int half = 0; half < 2; ++half) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint8_t* w = weights + 128 * half;
    for (int step = 0; step < steps; ++step, w += 16 * kPairBytes) {
      const int at = k + step * kTileInputs;
      _tile_loadd(4, rows.x + at, rows.stride);
      _tile_loadd(6, w, kPairBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + 64, kPairBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, lower_x + at, rows.stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* target = sums + 32 * half;
    _tile_stored(0, target, kPairBytes);
    _tile_stored(1, target + 16, kPairBytes);
    _tile_stored(2, target + kTileRows * kPanel, kPairBytes);
    _tile_stored(3, target + kTileRows * kPanel + 16, kPairBytes);
  }
}

void multiply(const Rows& rows, const uint8_t* weights, int k, int steps, float* sums) {
  if (rows.lower > 0) multiply_both(rows, weights, k, steps, sums);
  else multiply_upper(rows, weights, k, steps, sums);
}

// body(first, last) for blocks of at most 32 rows.
template <class Body>
void for_blocks(const Item& item, Body&& body) {
  for (int first = item.first; first < item.last; first += kBlockRows) {
    const int last = first + kBlockRows < item.last ? first + kBlockRows : item.last;
    body(first, last);
  }
}

void run_bf16(const LinearCall& call, const bf16_t* x, const Item& item) {
  const int padded = call.weight->shape.padded_inputs();
  const uint8_t* panel = call.weight->panel(item.panel);
  alignas(64) float sums[kBlockRows * kPanel];
  Tiles tiles;
  for_blocks(item, [&](int first, int last) {
    const Rows rows(x, padded, first, last);
    tiles.configure(rows.upper, rows.lower);
    multiply(rows, panel, 0, padded / kTileInputs, sums);
    finish_rows(call, item.panel, first, last - first, sums);
  });
}

// Expand a group of 4-bit codes to bf16 pairs [group / 2][64][2]. A word holds eight inputs of one
// output; VPERMW looks up the low four bits of each half word (the fifth bit is ignored by doubling
// the table), which pairs inputs (0, 2), (4, 6), (1, 3), (5, 7) of the eight.
void expand_q4(const uint8_t* words, int group, uint8_t* out) {
  alignas(64) bf16_t values[32];
  for (int i = 0; i < 32; ++i) values[i] = float_to_bf16(static_cast<float>(i % 16));
  const __m512i table = _mm512_load_si512(values);
  for (int k = 0; k < group; k += 8, words += kPairBytes, out += 4 * kPairBytes)
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

inline __m512 load16(const uint8_t* p, Float type, int at) {
  const uint8_t* from = p + at * float_size(type);
  if (type == Float::f32) return _mm512_loadu_ps(from);
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  if (type == Float::f16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// sums += scale * dots + bias * sum of the group's activations, for rows of 64 outputs.
void apply_scales(const PackedShape& shape, const uint8_t* block, const float* dots, const float* x_sums,
                  std::size_t x_stride, int rows, float* sums) {
  const uint8_t* parameters = block + shape.code_bytes();
  for (int column = 0; column < kPanel; column += 16) {
    const __m512 scale = load16(parameters, shape.scale_type, column);
    const __m512 bias = load16(parameters, shape.scale_type, kPanel + column);
    for (int m = 0; m < rows; ++m) {
      float* target = sums + m * kPanel + column;
      __m512 sum = _mm512_loadu_ps(target);
      sum = _mm512_fmadd_ps(scale, _mm512_loadu_ps(dots + m * kPanel + column), sum);
      sum = _mm512_fmadd_ps(bias, _mm512_set1_ps(x_sums[m * x_stride]), sum);
      _mm512_storeu_ps(target, sum);
    }
  }
}

// Activations for quantized weights: bf16 in the order expand_* leaves the inputs in, and their sums
// per group [rows, groups].
struct GroupedRows {
  bf16_t* x;
  float* sums;
};

void prepare_group(const LinearCall& call, std::size_t at, bf16_t* out, float* sum) {
  const PackedShape& shape = call.weight->shape;
  float values[128];
  load_floats(call.x, call.x_type, at, shape.group, values);
  const bool pair_up = shape.kind == WeightKind::q4;
  float lanes[16] = {};
  for (int k = 0; k < shape.group; ++k) {
    const int i = k % 8;
    const int place = pair_up ? k - i + i / 2 + 4 * (i % 2) : k;  // evens, then odds
    out[place] = float_to_bf16(values[k]);
    lanes[k % 16] += bf16_to_float(out[place]);
  }
  for (int half = 8; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  *sum = lanes[0];
}

GroupedRows prepare_rows(const LinearCall& call) {
  const PackedShape& shape = call.weight->shape;
  const std::size_t groups = shape.num_groups(), rows = call.rows;
  const std::size_t x_bytes = (rows * shape.inputs * sizeof(bf16_t) + 63) / 64 * 64;
  uint8_t* scratch = static_cast<uint8_t*>(thread_scratch(x_bytes + 4 * rows * groups, 1));
  const GroupedRows out{reinterpret_cast<bf16_t*>(scratch), reinterpret_cast<float*>(scratch + x_bytes)};
  const auto prepare = [&](int m) {
    for (std::size_t g = 0; g < groups; ++g) {
      const std::size_t at = static_cast<std::size_t>(m) * shape.inputs + g * shape.group;
      prepare_group(call, at, out.x + at, out.sums + m * groups + g);
    }
  };
  if (call.rows >= 16) parallel_for(call.rows, prepare);
  else for (int m = 0; m < call.rows; ++m) prepare(m);
  return out;
}

void run_quantized(const LinearCall& call, const GroupedRows& grouped, const Item& item) {
  const PackedShape& shape = call.weight->shape;
  const std::size_t groups = shape.num_groups();
  const int num_rows = item.last - item.first;
  uint8_t* expanded =
      static_cast<uint8_t*>(thread_scratch(shape.group / 2 * kPairBytes + sizeof(float) * kPanel * num_rows));
  float* sums = reinterpret_cast<float*>(expanded + shape.group / 2 * kPairBytes);
  std::memset(sums, 0, sizeof(float) * kPanel * num_rows);
  alignas(64) float dots[kBlockRows * kPanel];
  const uint8_t* block = call.weight->panel(item.panel);
  Tiles tiles;
  for (std::size_t g = 0; g < groups; ++g, block += shape.block_bytes()) {
    if (shape.kind == WeightKind::q4) expand_q4(block, shape.group, expanded);
    else expand_q8(block, shape.group, expanded);
    for_blocks(item, [&](int first, int last) {
      const Rows rows(grouped.x, shape.inputs, first, last);
      tiles.configure(rows.upper, rows.lower);
      multiply(rows, expanded, static_cast<int>(g) * shape.group, shape.group / kTileInputs, dots);
      apply_scales(shape, block, dots, grouped.sums + first * groups + g, groups, last - first,
                   sums + (first - item.first) * kPanel);
    });
  }
  finish_rows(call, item.panel, item.first, num_rows, sums);
}

}  // namespace

void linear_tiles(const LinearCall& call) {
  const Items items(call, kItemRows);
  if (call.weight->shape.quantized()) {
    const GroupedRows grouped = prepare_rows(call);
    parallel_for(items.count, [&](int i) { run_quantized(call, grouped, items[i]); });
  } else {
    const bf16_t* x = bf16_rows(call);
    parallel_for(items.count, [&](int i) { run_bf16(call, x, items[i]); });
  }
}

}  // namespace octavo::amx
