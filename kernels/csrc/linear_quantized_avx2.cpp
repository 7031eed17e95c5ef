// Quantized weights on AVX2 in integers.
//
// Activations are rounded per row and block of inputs (a group, at most 64) to a scale a times signed
// codes xq, so that for affine weights
//
//   y = sum over blocks of  a s (q . xq)  +  a b sum(xq)
//
// Codes of 1 to 4 bits and E2M1 go through VPMADDUBSW with 8-bit activations. Its 16-bit sums are let
// wrap: they start at -c sum(xq), c the middle of the codes, and end as (q - c) . xq, which fits (64
// inputs of 4 bits: 32 * 8 * 127 per half). E2M1 values are looked up as 2 value + 12. Codes of 5, 6
// and 8 bits would saturate there: they are widened and go through VPMADDWD, which takes 16-bit
// activations at the same speed. Every integer sum is exact, so only the order of blocks matters, and
// that is the same for any number of rows.
//
// Rounding moves an activation by at most a / 2, hence
//   |error| <= sum over blocks of  max|x| / 254 (8 bits) or max|x| / 65534 (16 bits) * sum|w|.
#include <utility>

#include "integer_rows_avx2.h"

namespace octavo::avx2 {
namespace {

constexpr int kTileRows = 6;
constexpr int kItemTiles = 8;  // row tiles that share what they read of a panel
constexpr int kAhead = 3072;   // bytes of codes fetched before they are used

// How four codes each of eight outputs become bytes of a register.
template <int kCodeBits, bool kE2m1 = false>
struct Format {
  static constexpr bool kWide = kCodeBits > 4;  // 16-bit activations
  static constexpr int kLow = kCodeBits >= 4 && kCodeBits < 8 ? 4 : kCodeBits == 3 ? 2 : kCodeBits;
  static constexpr int kHigh = kCodeBits - kLow;
  static constexpr int kMiddle = kE2m1 ? 12 : kWide ? 0 : 1 << (kCodeBits - 1);
  // Quads in a row after which words of all planes begin anew.
  static constexpr int kQuads = kE2m1                          ? 2
                                : kHigh == 1 || kCodeBits == 1 ? 8
                                : kLow == 2 || kHigh == 2      ? 4
                                                               : 2;

  static __m256i plane(const uint8_t* words, int bits, int quad, int above) {
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + quad * bits / 8 * 256));
    const int right = quad * bits % 8 - above;
    const __m256i mask = _mm256_set1_epi8(static_cast<char>(((1 << bits) - 1) << above));
    if (bits == 8) return word;
    return _mm256_and_si256(right < 0 ? _mm256_slli_epi16(word, -right) : _mm256_srli_epi16(word, right),
                            mask);
  }

  static __m256i load(const uint8_t* low, const uint8_t* high, int quad) {
    __m256i codes = plane(low, kLow, quad, 0);
    if constexpr (kHigh > 0) codes = _mm256_or_si256(codes, plane(high, kHigh, quad, kLow));
    if constexpr (kE2m1) {
      const __m128i values = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
      codes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), codes);
    }
    return codes;
  }
};

// A block's scales and biases of the 64 outputs, as the sums want them.
struct Parameters {
  alignas(32) float scale[kPanel];
  alignas(32) float bias[kPanel];
};

// Eight affine scales or biases.
inline __m256 load_eight(const uint8_t* from, Float type, int at) {
  if (type == Float::f32) return _mm256_loadu_ps(reinterpret_cast<const float*>(from) + at);
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * at));
  if (type == Float::f16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// Eight scales of E2M1 groups: fp4_scale.
inline __m256 load_eight_fp4(const uint8_t* from, bool e8m0, int at) {
  const __m256i bits = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + at)));
  if (e8m0) {
    const __m256i zero = _mm256_cmpeq_epi32(bits, _mm256_setzero_si256());
    const __m256i least = _mm256_and_si256(zero, _mm256_set1_epi32(0x00400000));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(bits, 23), least));
  }
  const __m256i magnitude = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(127)), 20);
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(bits, 7), 31);
  const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p120f));
  return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
}

template <class F>
inline void load_parameters(const PackedShape& shape, const uint8_t* from, Parameters& out) {
  const __m256 middle = _mm256_set1_ps(static_cast<float>(F::kMiddle)), half = _mm256_set1_ps(0.5f);
  if (shape.affine()) {
    for (int n = 0; n < kPanel; n += 8) {
      const __m256 scale = load_eight(from, shape.scale_type, n);
      const __m256 bias = load_eight(from, shape.scale_type, kPanel + n);
      _mm256_store_ps(out.scale + n, scale);
      _mm256_store_ps(out.bias + n, _mm256_fmadd_ps(middle, scale, bias));
    }
    return;
  }
  for (int n = 0; n < kPanel; n += 8) {  // codes are twice the values
    const __m256 scale = load_eight_fp4(from, shape.kind == WeightKind::mxfp4, n);
    _mm256_store_ps(out.scale + n, _mm256_mul_ps(half, scale));
    _mm256_store_ps(out.bias + n, _mm256_setzero_ps());
  }
}

// body(integral constant i) for i in [0, count), unrolled before the compiler looks at arrays: sums that a
// loop indexes would stay in memory.
template <int count, class Body>
inline __attribute__((always_inline)) void unrolled(Body&& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, count>());
}

// Sums of R rows by 8 C outputs.
template <int R, int C>
struct Sums {
  __m256i at[R][C];
};

// Add up now: compilers that first add the values of several steps run out of registers.
inline __m256i settled(__m256i sum) {
  asm volatile("" : "+x"(sum));
  return sum;
}

// One word of activations per row, times `codes`.
template <bool kWide, int R, int C>
inline __attribute__((always_inline)) void add_products(const int32_t* x, const __m256i (&codes)[C],
                                                        Sums<R, C>& sums) {
  unrolled<R>([&](auto m) __attribute__((always_inline)) {
    const __m256i value = _mm256_set1_epi32(x[m]);
    unrolled<C>([&](auto c) __attribute__((always_inline)) {
      __m256i& sum = sums.at[m][c];
      if constexpr (kWide) sum = settled(_mm256_add_epi32(sum, _mm256_madd_epi16(codes[c], value)));
      else sum = settled(_mm256_add_epi16(sum, _mm256_maddubs_epi16(codes[c], value)));
    });
  });
}

// Products of one block: R rows by 8 C outputs, the planes starting at their columns.
template <class F, int R, int C>
inline __attribute__((always_inline)) Sums<R, C> dot_block(const int32_t* x, const int32_t* starts,
                                                           const uint8_t* low, const uint8_t* high,
                                                           int quads) {
  Sums<R, C> sums;
  unrolled<R>([&](auto m) __attribute__((always_inline)) {
    const __m256i start = F::kWide ? _mm256_setzero_si256() : _mm256_set1_epi32(starts[m]);
    unrolled<C>([&](auto c) __attribute__((always_inline)) { sums.at[m][c] = start; });
  });
  for (int first = 0; first < quads; first += F::kQuads) {
    unrolled<F::kQuads>([&](auto quad) __attribute__((always_inline)) {
      __m256i codes[C];
      unrolled<C>([&](auto c) __attribute__((always_inline)) {
        codes[c] = F::load(low + 32 * c, high + 32 * c, quad);
      });
      if constexpr (F::kWide) {
        const __m256i bytes = _mm256_set1_epi16(255);
        __m256i even[C];
        unrolled<C>([&](auto c)
                        __attribute__((always_inline)) { even[c] = _mm256_and_si256(codes[c], bytes); });
        add_products<true>(x, even, sums);
        unrolled<C>([&](auto c)
                        __attribute__((always_inline)) { codes[c] = _mm256_srli_epi16(codes[c], 8); });
        add_products<true>(x + R, codes, sums);
        x += 2 * R;
      } else {
        add_products<false>(x, codes, sums);
        x += R;
      }
    });
    for (int at = 0; at < F::kQuads * F::kLow / 8 * 256; at += 256)
      for (int c = 0; c < C; c += 2)
        _mm_prefetch(reinterpret_cast<const char*>(low + kAhead + at + 32 * c), _MM_HINT_T0);
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

// One block of inputs of a panel, as all tiles of an item meet it.
struct BlockView {
  const uint8_t* low;
  const uint8_t* high;
  const Parameters* parameters;
  int quads;
  bool affine;
};

// sums[R][64] += one block.
template <class F, int R>
__attribute__((noinline)) void multiply_block(const BlockView& block, const int32_t* x, const float* scales,
                                              const float* x_sums, const int32_t* starts, float* sums) {
  constexpr int C = R == 1 ? 8 : R == 2 ? 4 : 2;  // one row reads its panel in order
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
        if (block.affine) sum = _mm256_fmadd_ps(bias, _mm256_set1_ps(x_sums[m]), sum);
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
  const std::size_t row_words = static_cast<std::size_t>(shape.inputs) / 4 * x.words;
  Parameters parameters;
  for (int b = 0; b < x.blocks; ++b) {
    const int k = b * block;
    const uint8_t* group = call.weight->panel(panel) + shape.block_bytes() * (k / shape.group);
    const int inside = k % shape.group;
    if (inside == 0) load_parameters<F>(shape, group + shape.code_bytes(), parameters);
    const BlockView view{group + PackedShape::plane_bytes(inside, F::kLow),
                         group + high_plane + PackedShape::plane_bytes(inside, F::kHigh), &parameters,
                         block / 4, shape.affine()};
    for (int tile = first_tile; tile < last_tile; ++tile) {
      const int row = tiles.first(tile), size = tiles.size(tile);
      const std::size_t at = static_cast<std::size_t>(row) * x.blocks + static_cast<std::size_t>(b) * size;
      const int32_t* codes = x.codes + row * row_words + static_cast<std::size_t>(k / 4 * x.words) * size;
      with_rows<kTileRows>(size, [&](auto count) {
        multiply_block<F, decltype(count)::value>(view, codes, x.scales + at, x.sums + at, x.starts + at,
                                                  sums + (row - first) * kPanel);
      });
    }
  }
  finish_rows(call, panel, first, rows, sums);
}

template <class F>
void run(const LinearCall& call) {
  const RowTiles tiles(call.rows, kTileRows);
  const int block = call.weight->shape.group < kMaxBlock ? call.weight->shape.group : kMaxBlock;
  const Rows x = quantize_rows(call, tiles, block, F::kWide ? 2 : 1, F::kMiddle);
  for_items(call, tiles, kItemTiles, [&](int panel, int first_tile, int last_tile) {
    run_item<F>(call, x, tiles, block, panel, first_tile, last_tile);
  });
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
