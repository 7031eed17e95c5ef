// y = x W^T in float32 for every kind of weight and every instruction set, in standard C++ with GCC vectors.
//
// Each sum runs over the inputs in ascending order, with one multiply-add per input (fused if there is FMA).
// Weights are decoded to float32 once for all rows of an item, one block of a panel at a time.
#include "linear/common.h"
#include "linear/decode.h"
#include "runtime/unrolled.h"
#include "runtime/vectors.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kTileRows = 6;
constexpr int kItemTiles = 16;    // row tiles that share a decoded chunk
constexpr int kBlockInputs = 64;  // inputs decoded at once for weights without groups

// Number of output vectors in a tile of R rows; the tile's sums fill about three quarters of the registers.
// Even a single row has enough independent sums to hide the latency of two multiply-adds per cycle.
template <int R>
constexpr int kVectors = kLanes == 16 ? 4
                         : R == 1     ? 8
                         : R == 2     ? 4
                                      : 2;

// Computes sum += w * x in place; compilers would use more registers than there are.
inline __attribute__((always_inline)) void add_product(Vec& sum, Vec w, Vec x) {
#if defined(__FMA__) && !defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
#else
  sum += w * x;
#endif
}

inline __attribute__((always_inline)) Vec broadcast(float x) { return x - Vec{}; }

// Adds x[count][R] times w[count][strip of 64] to sums[R][strip of 64].
template <int R>
__attribute__((noinline)) void multiply_floats(const float* x, const float* w, int count, float* sums) {
  constexpr int V = kVectors<R>;
  Vec at[R][V];
  unrolled<R * V>([&](auto i) __attribute__((always_inline)) {
    at[i / V][i % V] = load(sums + i / V * kPanel + i % V * kLanes);
  });
  for (int k = 0; k < count; ++k, x += R, w += kPanel) {
    Vec weight[V];
    unrolled<V>([&](auto v) __attribute__((always_inline)) { weight[v] = load(w + v * kLanes); });
    unrolled<R>([&](auto m) __attribute__((always_inline)) {
      const Vec value = broadcast(x[m]);
      unrolled<V>([&](auto v) __attribute__((always_inline)) { add_product(at[m][v], weight[v], value); });
    });
  }
  unrolled<R * V>([&](auto i) __attribute__((always_inline)) {
    store(sums + i / V * kPanel + i % V * kLanes, at[i / V][i % V]);
  });
}

// Returns x as float32 in row tiles with zero padding, in thread_scratch slot 1.
const float* tile_rows(const LinearCall& call, const RowTiles& tiles) {
  const int inputs = call.weight->shape.inputs, padded = call.weight->shape.padded_inputs();
  float* out = static_cast<float*>(thread_scratch(sizeof(float) * padded * call.rows, 1));
  for_tiles(call, tiles, [&](int tile) {
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
  });
  return out;
}

// Multiplies row tiles [first_tile, last_tile) by a panel, block by block: a group or some inputs.
void run_item(const LinearCall& call, const float* x, const RowTiles& tiles, int panel, int first_tile,
              int last_tile) {
  const PackedShape& shape = call.weight->shape;
  const int first = tiles.first(first_tile), rows = tiles.first(last_tile) - first;
  const int inputs = shape.padded_inputs(), block = shape.quantized() ? shape.group : kBlockInputs;
  float* const decoded = static_cast<float*>(thread_scratch(sizeof(float) * kPanel * (block + rows)));
  float* const sums = decoded + static_cast<std::size_t>(block) * kPanel;
  std::memset(sums, 0, sizeof(float) * kPanel * rows);
  for (int k = 0; k < inputs; k += block) {
    const int count = std::min(inputs - k, block);
    const float* w = decoded;
    if (shape.kind == WeightKind::f32)
      w = reinterpret_cast<const float*>(call.weight->panel(panel)) + k * kPanel;
    else decode(*call.weight, panel, k, count, decoded);
    for (int tile = first_tile; tile < last_tile; ++tile) {
      const int row = tiles.first(tile);
      with_rows<kTileRows>(tiles.size(tile), [&](auto size) {
        constexpr int R = decltype(size)::value;
        const float* const from =
            x + static_cast<std::size_t>(row) * inputs + static_cast<std::size_t>(k) * R;
        for (int c = 0; c < kPanel; c += kLanes * kVectors<R>)
          multiply_floats<R>(from, w + c, count, sums + static_cast<std::size_t>(row - first) * kPanel + c);
      });
    }
  }
  finish_rows(call, panel, first, rows, sums);
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
