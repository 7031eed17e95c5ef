// Quantized weights on AVX2 in integers.
//
// Activations are rounded, per row and block of inputs (a group, at most 64), to a scale a times signed 8-bit
// codes xq. So affine weights give
//
//   y = sum over blocks of  a s (q . xq)  +  a b sum(xq)
//
// VPMADDUBSW multiplies and adds two inputs at a time in 16 bits. For codes of 4 bits and E2M1, sums stay in
// 16 bits. These sums start at -c sum(xq), where c is the middle of the codes, and may wrap in
// between. They end as (q - c) . xq, which fits (64 inputs of 4 bits: 32 * 8 * 127 per half). E2M1 values are
// looked up as 2 value + 12. Codes of 1, 2, 3, 5 and 6 bits are first unpacked to bytes. Of bytes, each sum
// of two products is widened at once. With 8 bits such a sum fits, because the scale also limits the sum of
// two activations to 128 (255 * 128 < 2^15). Every integer sum is exact, so only the order of blocks matters,
// and it is fixed for any number of rows.
//
// Rounding changes an activation by at most a / 2, hence
//   |error| <= sum over blocks of  max|x| / 254 * sum|w|,
// where for 8-bit codes max|x| also runs over |x + x'| of any two inputs that are added.
#include "linear/fetch_avx2.h"
#include "linear/integer_rows_avx2.h"
#include "linear/integer_weights.h"

namespace octavo::avx2 {
namespace {

constexpr int kTileRows = 6;
constexpr int kItemTiles = 8;  // most row tiles that share a panel
constexpr int kAhead = 3072;   // prefetch distance in bytes of codes

// Sums of R rows and 8 C outputs.
template <int R, int C>
struct Sums {
  __m256i at[R][C];
};

alignas(32) constexpr int16_t kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// Makes the compiler add here. If it first combined the values of several steps, it would run out of
// registers.
inline __m256i settled(__m256i sum) {
  asm volatile("" : "+x"(sum));
  return sum;
}

// Adds products of one word of activations and the codes of two vectors of outputs. It is assembly, because
// twelve sums leave only four registers; compilers use more and spill sums.
template <bool kWide>
inline __attribute__((always_inline)) void add_pair(const int32_t* x, __m256i codes_0, __m256i codes_1,
                                                    __m256i& sum_0, __m256i& sum_1) {
  __m256i to_0 = sum_0, to_1 = sum_1, product, value;
#define OCTAVO_ADD_PAIR(widen, add)                                                                     \
  asm("vpbroadcastd %[x], %[value]\n\t"                                                                 \
      "vpmaddubsw %[value], %[codes_0], %[product]\n\t"                                                 \
      "vpmaddubsw %[value], %[codes_1], %[value]\n\t" widen add " %[product], %[to_0], %[to_0]\n\t" add \
      " %[value], %[to_1], %[to_1]"                                                                     \
      : [to_0] "+x"(to_0), [to_1] "+x"(to_1), [product] "=&x"(product), [value] "=&x"(value)            \
      : [x] "m"(*x), [codes_0] "x"(codes_0), [codes_1] "x"(codes_1), [ones] "m"(kOnes))
  if constexpr (kWide)
    OCTAVO_ADD_PAIR("vpmaddwd %[ones], %[product], %[product]\n\tvpmaddwd %[ones], %[value], %[value]\n\t",
                    "vpaddd");
  else OCTAVO_ADD_PAIR("", "vpaddw");
#undef OCTAVO_ADD_PAIR
  sum_0 = to_0;
  sum_1 = to_1;
}

// Adds products of one word of activations per row and `codes`.
template <bool kWide, int R, int C>
inline __attribute__((always_inline)) void add_products(const int32_t* x, const __m256i (&codes)[C],
                                                        Sums<R, C>& sums) {
  unrolled<R>([&](auto m) __attribute__((always_inline)) {
    if constexpr (C == 2) {
      add_pair<kWide>(x + m, codes[0], codes[1], sums.at[m][0], sums.at[m][1]);
    } else {
      const __m256i value = _mm256_set1_epi32(x[m]);
      unrolled<C>([&](auto c) __attribute__((always_inline)) {
        __m256i& sum = sums.at[m][c];
        const __m256i product = _mm256_maddubs_epi16(codes[c], value);
        if constexpr (kWide)
          sum = settled(_mm256_add_epi32(sum, _mm256_madd_epi16(product, _mm256_set1_epi16(1))));
        else sum = settled(_mm256_add_epi16(sum, product));
      });
    }
  });
}

// Adds the products of one block, R rows by 8 C outputs; `planes` point to these outputs.
template <class F, int R, int C>
inline __attribute__((always_inline)) Sums<R, C> dot_block(const int32_t* x, const int32_t* starts,
                                                           const uint8_t* low, const uint8_t* high,
                                                           int quads) {
  Sums<R, C> sums;
  unrolled<R>([&](auto m) __attribute__((always_inline)) {
    __m256i start = _mm256_set1_epi32(starts[m]);
    if constexpr (F::kWide) start = _mm256_madd_epi16(start, _mm256_set1_epi16(1));
    unrolled<C>([&](auto c) __attribute__((always_inline)) { sums.at[m][c] = start; });
  });
  for (int first = 0; first < quads; first += F::kQuads) {
    unrolled<F::kQuads>([&](auto quad) __attribute__((always_inline)) {
      __m256i codes[C];
      unrolled<C>([&](auto c) __attribute__((always_inline)) {
        codes[c] = (__m256i)F::load_codes(low + 32 * c, high + 32 * c, quad);
      });
      add_products<F::kWide>(x, codes, sums);
      x += R;
    });
    for (int at = 0; prefetches_weights<R>() && at < F::kQuads * F::kLow / 8 * 256; at += 256)
      for (int c = 0; c < C; c += 2) fetch_weights<F::kWide>(low + kAhead + at + 32 * c);
    low += F::kQuads * F::kLow / 8 * 256;
    high += F::kQuads * F::kHigh / 8 * 256;
  }
  if constexpr (!F::kWide)
    unrolled<R * C>([&](auto i) __attribute__((always_inline)) {
      __m256i& sum = sums.at[i / C][i % C];
      sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
    });
  return sums;
}

// One block of a panel's inputs, which all row tiles of an item use.
struct BlockView {
  const uint8_t* low;
  const uint8_t* high;
  const Parameters* parameters;
  int quads;
};

// Adds products with one block to sums[R][64].
template <class F, int R>
__attribute__((noinline)) void multiply_block(const BlockView& block, const int32_t* x, const float* scales,
                                              const float* x_sums, const int32_t* starts, float* sums) {
  constexpr int C = R == 2 ? 4 : 2;
  for (int column = 0; column < kPanel; column += 8 * C) {
    const Sums<R, C> dots =
        dot_block<F, R, C>(x, starts, block.low + 4 * column, block.high + 4 * column, block.quads);
    unrolled<C>([&](auto c) __attribute__((always_inline)) {
      const __m256 scale = _mm256_load_ps(block.parameters->scale + column + 8 * c);
      const __m256 bias = _mm256_load_ps(block.parameters->bias + column + 8 * c);
      unrolled<R>([&](auto m) __attribute__((always_inline)) {
        float* target = sums + m * kPanel + column + 8 * c;
        const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(dots.at[m][c]), scale);
        __m256 sum = _mm256_fmadd_ps(product, _mm256_set1_ps(scales[m]), _mm256_loadu_ps(target));
        if constexpr (F::kAffine) sum = _mm256_fmadd_ps(bias, _mm256_set1_ps(x_sums[m]), sum);
        _mm256_storeu_ps(target, sum);
      });
    });
  }
}

template <class F>
void run_item(const LinearCall& call, const Rows& x, const RowTiles& tiles, int block, int panel,
              int first_tile, int last_tile) {
  const PackedShape& shape = call.weight->shape;
  const int first = tiles.first(first_tile), rows = tiles.first(last_tile) - first;
  alignas(32) float sums[kItemTiles * kTileRows * kPanel];
  std::memset(sums, 0, sizeof(float) * kPanel * rows);
  const std::size_t high_plane = PackedShape::plane_bytes(shape.group, F::kLow);
  const std::size_t row_words = static_cast<std::size_t>(shape.inputs) / 4;
  Parameters parameters;
  alignas(32) uint8_t bytes[F::kDirect ? 1 : kMaxBlock * kPanel];
  for (int b = 0; b < x.blocks; ++b) {
    const int k = b * block;
    const uint8_t* group = call.weight->panel(panel) + shape.block_bytes() * (k / shape.group);
    const int inside = k % shape.group;
    if (inside == 0) load_parameters<F>(shape, group + shape.code_bytes(), parameters);
    BlockView view{group + PackedShape::plane_bytes(inside, F::kLow),
                   group + high_plane + PackedShape::plane_bytes(inside, F::kHigh), &parameters, block / 4};
    if constexpr (!F::kDirect) {
      unpack<F>(view.low, view.high, view.quads, bytes);
      for (int ahead = 0; ahead < block * F::kBits * kPanel / 8; ahead += 64)
        fetch_weights<true>(view.low + kAhead + ahead);
      view.low = bytes;
    }
    for (int tile = first_tile; tile < last_tile; ++tile) {
      const int row = tiles.first(tile), size = tiles.size(tile);
      const std::size_t at = static_cast<std::size_t>(row) * x.blocks + static_cast<std::size_t>(b) * size;
      const int32_t* codes = x.codes + row * row_words + static_cast<std::size_t>(k / 4) * size;
      with_rows<kTileRows>(size, [&](auto count) {
        using Codes = std::conditional_t<F::kDirect, F, Format<8>>;
        multiply_block<Codes, decltype(count)::value>(view, codes, x.scales + at, x.sums + at, x.starts + at,
                                                      sums + (row - first) * kPanel);
      });
    }
  }
  finish_rows(call, panel, first, rows, sums);
}

// Multiplies a single row and reads a panel's scales in place. For several rows they are converted to floats
// first; for one row that conversion would be a third of the run time.
template <class F, Float kType>
inline __attribute__((always_inline)) void multiply_row(const BlockView& block, const uint8_t* parameters,
                                                        bool e8m0, const int32_t* x, float x_scale,
                                                        float x_sum, const int32_t* start, float* sums) {
  constexpr int C = kPanel / 8;
  const Sums<1, C> dots = dot_block<F, 1, C>(x, start, block.low, block.high, block.quads);
  unrolled<C>([&](auto c) __attribute__((always_inline)) {
    const ScaleAndBias eight = F::parameters(parameters, kType, e8m0, 8 * c);
    const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(dots.at[0][c]), eight.scale);
    __m256 sum = _mm256_fmadd_ps(product, _mm256_set1_ps(x_scale), _mm256_load_ps(sums + 8 * c));
    if constexpr (F::kAffine) sum = _mm256_fmadd_ps(eight.bias, _mm256_set1_ps(x_sum), sum);
    _mm256_store_ps(sums + 8 * c, sum);
  });
}

template <class F, Float kType>
void run_row(const LinearCall& call, const Rows& x, int block, int panel) {
  const PackedShape& shape = call.weight->shape;
  const bool e8m0 = shape.kind == WeightKind::mxfp4;
  const std::size_t code_bytes = shape.code_bytes(), block_bytes = shape.block_bytes();
  const std::size_t high_plane = PackedShape::plane_bytes(shape.group, F::kLow);
  alignas(32) float sums[kPanel] = {};
  const uint8_t* group = call.weight->panel(panel);
  const int32_t* codes = x.codes;
  for (int b = 0; b < x.blocks; group += block_bytes)
    for (int inside = 0; inside < shape.group; inside += block, codes += block / 4, ++b) {
      const BlockView view{group + PackedShape::plane_bytes(inside, F::kLow),
                           group + high_plane + PackedShape::plane_bytes(inside, F::kHigh), nullptr,
                           block / 4};
      multiply_row<F, kType>(view, group + code_bytes, e8m0, codes, x.scales[b], x.sums[b], x.starts + b,
                             sums);
    }
  finish_rows(call, panel, 0, 1, sums);
}

template <class F>
void run_rows(const LinearCall& call, const Rows& x, const RowTiles& tiles, int block) {
  const Float type = F::kAffine ? call.weight->shape.scale_type : Float::bf16;
  if constexpr (F::kDirect)
    if (call.rows == 1 && type != Float::f32)  // 16-bit activations have scales of 16 bits
      return for_items(call, tiles, 1, [&](int panel, int, int) {
        if constexpr (F::kAffine)
          if (type == Float::f16) return run_row<F, Float::f16>(call, x, block, panel);
        run_row<F, Float::bf16>(call, x, block, panel);
      });
  for_items(call, tiles, kItemTiles, [&](int panel, int first_tile, int last_tile) {
    run_item<F>(call, x, tiles, block, panel, first_tile, last_tile);
  });
}

template <class F>
void run(const LinearCall& call) {
  const RowTiles tiles(call.rows, kTileRows);
  const int block = call.weight->shape.group < kMaxBlock ? call.weight->shape.group : kMaxBlock;
  const Rows x = quantize_rows(call, tiles, block, F::kMiddle, F::kPairs);
  run_rows<F>(call, x, tiles, block);
}

}  // namespace

void linear_integer(const LinearCall& call) {
  const PackedShape& shape = call.weight->shape;
  if (!shape.affine()) return run<Format<4, true>>(call);
  switch (shape.bits) {
    case 1: return run<Format<1>>(call);
    case 2: return run<Format<2>>(call);
    case 3: return run<Format<3>>(call);
    case 4: return run<Format<4>>(call);
    case 5: return run<Format<5>>(call);
    case 6: return run<Format<6>>(call);
    default: return run<Format<8>>(call);
  }
}

}  // namespace octavo::avx2
