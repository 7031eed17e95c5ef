// y = x W^T in float32, in standard C++ with GCC vectors: every kind of weight, every instruction set.
//
// Each sum runs over the inputs in ascending order, one fused (or, without FMA, one rounded) step per
// input. A chunk of a panel is decoded to float32 [chunk][64] first and then used for all rows of the item;
// for a few rows, bf16 weights are widened in registers instead.
#include "linear_common.h"
#include "linear_decode.h"
#include "unrolled.h"

namespace octavo::OCTAVO_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kTileRows = 6;
constexpr int kItemTiles = 16;    // row tiles that share a decoded chunk
constexpr int kDenseChunk = 64;   // inputs of a panel taken at once; quantized weights take a group
constexpr int kWidenedRows = 12;  // more rows repay what it takes to store and load widened weights
constexpr int kAhead = 4096;      // bytes of weights fetched before they are used

typedef float Vec __attribute__((vector_size(kWidth * 4), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4), aligned(4)));

// Vectors of outputs beside R rows: sums fill about three quarters of the registers, and a single row
// still has more sums under way than a multiply-add takes cycles times two.
template <int R>
constexpr int kVectors = kWidth == 16 ? 4
                         : R == 1     ? 8
                         : R == 2     ? 4
                                      : 2;

// sum += w * x in the register where sum is: left to themselves, compilers use more of them than there are.
inline __attribute__((always_inline)) void add_product(Vec& sum, Vec w, Vec x) {
#if defined(__FMA__) && !defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
#else
  sum += w * x;
#endif
}

inline __attribute__((always_inline)) Vec broadcast(float x) { return x - Vec{}; }

template <int R, int V>
struct Sums {
  Vec at[R][V];

  __attribute__((always_inline)) explicit Sums(const float* from) {
    unrolled<R * V>([&](auto i) __attribute__((always_inline)) {
      at[i / V][i % V] = *reinterpret_cast<const Vec*>(from + i / V * kPanel + i % V * kWidth);
    });
  }
  __attribute__((always_inline)) void store(float* to) const {
    unrolled<R * V>([&](auto i) __attribute__((always_inline)) {
      *reinterpret_cast<Vec*>(to + i / V * kPanel + i % V * kWidth) = at[i / V][i % V];
    });
  }
  // One input: x [R] times w [V].
  __attribute__((always_inline)) void add(const float* x, const Vec (&w)[V]) {
    unrolled<R>([&](auto m) __attribute__((always_inline)) {
      const Vec value = broadcast(x[m]);
      unrolled<V>([&](auto v) __attribute__((always_inline)) { add_product(at[m][v], w[v], value); });
    });
  }
};

// sums[R][64] += x[count][R] w[count][64]
template <int R>
__attribute__((noinline)) void multiply_floats(const float* x, const float* w, int count, float* sums) {
  constexpr int V = kVectors<R>;
  for (int c = 0; c < kPanel; c += kWidth * V) {
    Sums<R, V> tile(sums + c);
    for (int k = 0; k < count; ++k) {
      Vec weight[V];
      unrolled<V>([&](auto v) __attribute__((always_inline)) {
        weight[v] = *reinterpret_cast<const Vec*>(w + k * kPanel + c + v * kWidth);
      });
      tile.add(x + k * R, weight);
    }
    tile.store(sums + c);
  }
}

// A vector of words, each a pair of bf16, as the first and the second of each pair.
inline Vec first_of_pairs(const uint32_t* words) {
  return reinterpret_cast<Vec>(*reinterpret_cast<const Words*>(words) << 16);
}
inline Vec second_of_pairs(const uint32_t* words) {
  return reinterpret_cast<Vec>(*reinterpret_cast<const Words*>(words) & 0xffff0000);
}

// The same with w as pairs of bf16 [count / 2][64][2].
template <int R>
__attribute__((noinline)) void multiply_pairs(const float* x, const uint32_t* w, int count, float* sums) {
  constexpr int V = kVectors<R>;
  for (int c = 0; c < kPanel; c += kWidth * V) {
    Sums<R, V> tile(sums + c);
    const uint32_t* words = w + c;
    for (int k = 0; k < count; k += 2, words += kPanel) {
      for (int v = 0; v < V; v += 64 / (4 * kWidth)) __builtin_prefetch(words + kAhead / 4 + v * kWidth);
      Vec weight[V];
      unrolled<V>([&](auto v)
                      __attribute__((always_inline)) { weight[v] = first_of_pairs(words + v * kWidth); });
      tile.add(x + k * R, weight);
      unrolled<V>([&](auto v)
                      __attribute__((always_inline)) { weight[v] = second_of_pairs(words + v * kWidth); });
      tile.add(x + (k + 1) * R, weight);
    }
    tile.store(sums + c);
  }
}

// Pairs of bf16 as float32 [count][64].
void widen_pairs(const uint32_t* words, int count, float* out) {
  for (int k = 0; k < count; k += 2, words += kPanel, out += 2 * kPanel)
    for (int n = 0; n < kPanel; n += kWidth) {
      *reinterpret_cast<Vec*>(out + n) = first_of_pairs(words + n);
      *reinterpret_cast<Vec*>(out + kPanel + n) = second_of_pairs(words + n);
    }
}

// x as float32 in tiles of rows, zero in the padding, in the caller's scratch slot 1.
const float* tile_rows(const LinearCall& call, const RowTiles& tiles) {
  const int inputs = call.weight->shape.inputs, padded = call.weight->shape.padded_inputs();
  float* out = static_cast<float*>(thread_scratch(sizeof(float) * padded * call.rows, 1));
  const auto arrange = [&](int tile) {
    const int first = tiles.first(tile), size = tiles.size(tile);
    float* target = out + static_cast<std::size_t>(first) * padded;
    constexpr int kBlock = 256;
    float values[kBlock];
    for (int m = 0; m < size; ++m)
      for (int k = 0; k < inputs; k += kBlock) {
        const int count = inputs - k < kBlock ? inputs - k : kBlock;
        load_floats(call.x, call.x_type, static_cast<std::size_t>(first + m) * inputs + k, count, values);
        for (int i = 0; i < count; ++i) target[static_cast<std::size_t>(k + i) * size + m] = values[i];
      }
    std::memset(target + static_cast<std::size_t>(inputs) * size, 0,
                sizeof(float) * (padded - inputs) * size);
  };
  if (call.rows > 8) parallel_for(tiles.count, arrange);
  else
    for (int tile = 0; tile < tiles.count; ++tile) arrange(tile);
  return out;
}

void run_item(const LinearCall& call, const float* x, const RowTiles& tiles, int panel_index, int first_tile,
              int last_tile) {
  const PackedShape& shape = call.weight->shape;
  const int inputs = shape.padded_inputs(), first = tiles.first(first_tile);
  const int rows = tiles.first(last_tile) - first;
  const bool pairs = shape.kind == WeightKind::bf16, in_registers = pairs && rows <= kWidenedRows;
  const int chunk = shape.quantized() ? shape.group : kDenseChunk;
  float* w = static_cast<float*>(thread_scratch(sizeof(float) * kPanel * (chunk + rows)));
  float* sums = w + static_cast<std::size_t>(chunk) * kPanel;
  std::memset(sums, 0, sizeof(float) * kPanel * rows);
  const uint8_t* panel = call.weight->panel(panel_index);
  for (int k = 0; k < inputs; k += chunk) {
    const int count = inputs - k < chunk ? inputs - k : chunk;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(panel) + k / 2 * kPanel;  // if of pairs
    if (!pairs) decode(shape, panel, k, count, w);
    else if (!in_registers) widen_pairs(words, count, w);
    for (int tile = first_tile; tile < last_tile; ++tile) {
      const int row = tiles.first(tile);
      float* target = sums + (row - first) * kPanel;
      with_rows<kTileRows>(tiles.size(tile), [&](auto size) {
        constexpr int R = decltype(size)::value;
        const float* x_tile = x + static_cast<std::size_t>(row) * inputs + k * R;
        if (in_registers) multiply_pairs<R>(x_tile, words, count, target);
        else multiply_floats<R>(x_tile, w, count, target);
      });
    }
  }
  finish_rows(call, panel_index, first, rows, sums);
}

}  // namespace

void linear_float32(const LinearCall& call) {
  const RowTiles tiles(call.rows, kTileRows);
  const float* x = tile_rows(call, tiles);
  for_items(call, tiles, kItemTiles, [&](int panel, int first_tile, int last_tile) {
    run_item(call, x, tiles, panel, first_tile, last_tile);
  });
}

}  // namespace octavo::OCTAVO_ISA
