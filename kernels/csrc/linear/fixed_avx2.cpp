// bf16 weights and activations on AVX2 in 16-bit fixed point. One VPMADDWD computes sixteen products, one
// float multiply-add only eight. A Zen 3 starts 1.64 VPMADDWD with their VPADDD per cycle, or 2
// multiply-adds.
//
// In each group of 128 inputs, the weights of an output become q = round(w / s), and the activations of a row
// xq = round(x / a), where s and a are powers of two. So
//
//   y = sum over groups of  s a (q . xq).
//
// The step a is such that 2^13 <= max|xq| < 2^14, and s is the smallest with sum|q| < 2^17 and |q| < 2^15. So
// every integer sum is below 2^31 and exact. Only the order of groups matters, and it is fixed for any number
// of rows. A bf16 number has 8 significant bits, so numbers of 2^7 steps or more are not rounded at all.
// Smaller numbers change by at most half a step, where a <= max|x| / 2^13 and (nearly) s <= max(sum|w| /
// 2^16, max|w| / 2^14), or either is 2^-126, the smallest step. Hence, unless a step is 2^-126,
//   |error| <= sum over groups of  max|x| / 2^14 * sum|w| + sum|x| * max(sum|w| / 2^17, max|w| / 2^15).
#include "linear/fetch_avx2.h"
#include "linear/fixed_rows_avx2.h"
#include "linear/fixed_weights_avx2.h"
#include "runtime/unrolled.h"

namespace octavo::avx2 {
namespace {

constexpr int kTileRows = 6;
constexpr int kItemTiles = 16;  // most row tiles that use a strip of codes
constexpr int kStep = 4;        // pairs of inputs multiplied between two prefetches
constexpr int kAhead = 4096;    // bytes of weights that a single row prefetches ahead

// Weights to be converted next. Their cache lines are prefetched a few at a time while other weights are
// multiplied.
struct Fetch {
  const uint8_t* line;
  int lines, per_step;

  void step() {
    if (lines <= 0) return;
    lines -= per_step;
    for (int i = 0; i < per_step; ++i, line += 64) fetch_weights(line);
  }
};

// Sums of R rows and a strip of outputs, in registers.
template <int R>
struct Sums {
  __m256i at[R][2];
};

// Adds products of one word of activations and a strip's codes. It is assembly, because twelve sums leave
// only four registers; compilers use more and spill sums.
inline __attribute__((always_inline)) void add_pair(const int32_t* x, __m256i codes_0, __m256i codes_1,
                                                    __m256i& sum_0, __m256i& sum_1) {
  __m256i to_0 = sum_0, to_1 = sum_1, product, value;
  asm("vpbroadcastd %[x], %[value]\n\t"
      "vpmaddwd %[value], %[codes_0], %[product]\n\t"
      "vpmaddwd %[value], %[codes_1], %[value]\n\t"
      "vpaddd %[product], %[to_0], %[to_0]\n\t"
      "vpaddd %[value], %[to_1], %[to_1]"
      : [to_0] "+x"(to_0), [to_1] "+x"(to_1), [product] "=&x"(product), [value] "=&x"(value)
      : [x] "m"(*x), [codes_0] "x"(codes_0), [codes_1] "x"(codes_1));
  sum_0 = to_0;
  sum_1 = to_1;
}

template <int R>
inline __attribute__((always_inline)) Sums<R> dot_group(const int32_t* x, const int32_t* codes, int pairs,
                                                        Fetch& next) {
  Sums<R> sums;
  unrolled<R * 2>([&](auto i)
                      __attribute__((always_inline)) { sums.at[i / 2][i % 2] = _mm256_setzero_si256(); });
  for (int pair = 0; pair < pairs; pair += kStep, x += kStep * R, codes += kStep * kStrip) {
    next.step();
    unrolled<kStep>([&](auto i) __attribute__((always_inline)) {
      const __m256i codes_0 = load_words(codes + i * kStrip), codes_1 = load_words(codes + i * kStrip + 8);
      unrolled<R>([&](auto m) __attribute__((always_inline)) {
        add_pair(x + i * R + m, codes_0, codes_1, sums.at[m][0], sums.at[m][1]);
      });
    });
  }
  return sums;
}

// Adds a group's products, scaled by both steps, to sums[8]. Multiplying in this order keeps intermediate
// values in float32's range unless the sum leaves it.
inline __attribute__((always_inline)) void add_group(__m256i dot, float x_step, __m256 step, float* sums) {
  const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(x_step));
  _mm256_storeu_ps(sums, _mm256_fmadd_ps(scaled, step, _mm256_loadu_ps(sums)));
}

// One group of inputs: activations of a row tile, and weights of a strip of outputs.
struct RowsView {
  const int32_t* codes;  // [pairs][R]
  const float* steps;    // [R]
};
struct StripView {
  const int32_t* codes;      // [pairs][16]
  const uint8_t* exponents;  // [16]
  int pairs;                 // a multiple of kStep
};

// Adds one group's products to sums[R][strip of 64]. Returns the memory that is left to prefetch.
template <int R>
__attribute__((noinline)) Fetch multiply_group(const RowsView& x, const StripView& strip, float* sums,
                                               Fetch next) {
  const Sums<R> dots = dot_group<R>(x.codes, strip.codes, strip.pairs, next);
  const __m256 step_0 = step_of(strip.exponents), step_1 = step_of(strip.exponents + 8);
  unrolled<R>([&](auto m) __attribute__((always_inline)) {
    add_group(dots.at[m][0], x.steps[m], step_0, sums + m * kPanel);
    add_group(dots.at[m][1], x.steps[m], step_1, sums + m * kPanel + 8);
  });
  return next;
}

void run_item(const LinearCall& call, const FixedRows& x, const RowTiles& tiles, int panel, int first_tile,
              int last_tile) {
  const int first = tiles.first(first_tile), rows = tiles.first(last_tile) - first;
  const int inputs = call.weight->shape.padded_inputs();
  alignas(64) int32_t codes[kFixedGroup / 2 * kPanel];
  alignas(64) float sums[kItemTiles * kTileRows * kPanel];
  std::memset(sums, 0, sizeof(float) * kPanel * rows);
  const uint8_t* words = call.weight->panel(panel);
  const uint8_t* exponents = call.weight->fixed_steps(panel);
  for (int k = 0, group = 0; k < inputs; k += kFixedGroup, ++group, exponents += kPanel) {
    const int pairs = std::min(inputs - k, kFixedGroup) / 2;
    fix_group(words, exponents, pairs, codes);
    words += pairs * kPairBytes;
    const int steps = pairs / kStep * (kPanel / kStrip) * (last_tile - first_tile), lines = 4 * pairs;
    Fetch next{words, lines, (lines + steps - 1) / steps};
    for (int column = 0; column < kPanel; column += kStrip) {
      const StripView strip{codes + column * pairs, exponents + column, pairs};
      for (int tile = first_tile; tile < last_tile; ++tile) {
        const int row = tiles.first(tile);
        with_rows<kTileRows>(tiles.size(tile), [&](auto size) {
          const RowsView view{x.codes_of(row, inputs) + k / 2 * size, x.steps_of(row) + group * size};
          next = multiply_group<decltype(size)::value>(view, strip, sums + (row - first) * kPanel + column,
                                                       next);
        });
      }
    }
  }
  finish_rows(call, panel, first, rows, sums);
}

// Multiplies a single row, for which weights are converted in registers and used at once.
void run_row(const LinearCall& call, const FixedRows& x, int panel) {
  constexpr int C = kPanel / 8;
  const int inputs = call.weight->shape.padded_inputs();
  alignas(32) float sums[kPanel] = {}, factors[kPanel];
  const uint8_t* words = call.weight->panel(panel);
  const uint8_t* exponents = call.weight->fixed_steps(panel);
  const int32_t* codes = x.codes;
  for (int k = 0, group = 0; k < inputs; k += kFixedGroup, ++group, exponents += kPanel) {
    __m256i dots[C];
    unrolled<C>([&](auto c) __attribute__((always_inline)) {
      _mm256_store_ps(factors + 8 * c, inverse_step(exponents + 8 * c));
      dots[c] = _mm256_setzero_si256();
    });
    for (int pair = std::min(inputs - k, kFixedGroup) / 2; pair > 0; --pair, ++codes, words += kPairBytes)
      unrolled<C>([&](auto c) __attribute__((always_inline)) {
        if constexpr (c % 2 == 0) fetch_weights(words + kAhead + 32 * c);
        const __m256i fixed = fixed_pairs(load_words(words + 32 * c), _mm256_load_ps(factors + 8 * c));
        dots[c] = _mm256_add_epi32(dots[c], _mm256_madd_epi16(fixed, _mm256_set1_epi32(*codes)));
      });
    unrolled<C>([&](auto c) __attribute__((always_inline)) {
      add_group(dots[c], x.steps[group], step_of(exponents + 8 * c), sums + 8 * c);
    });
  }
  finish_rows(call, panel, 0, 1, sums);
}

}  // namespace

void linear_fixed(const LinearCall& call) {
  const RowTiles tiles(call.rows, kTileRows);
  const FixedRows x = fix_rows(call, tiles);
  if (call.rows == 1) return for_items(call, tiles, 1, [&](int panel, int, int) { run_row(call, x, panel); });
  for_items(call, tiles, kItemTiles, [&](int panel, int first_tile, int last_tile) {
    run_item(call, x, tiles, panel, first_tile, last_tile);
  });
}

}  // namespace octavo::avx2
