// y = x W^T in float32 for every kind of weight and every instruction set, in standard C++ with GCC vectors.
//
// Each sum runs over the inputs in ascending order, with one multiply-add per input (fused if there is FMA).
// Weights are decoded to float32 once for all rows of an item, one block of a panel at a time.
#include "linear/common.h"
#include "linear/decode.h"
#include "runtime/unrolled.h"

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
constexpr int kBlockInputs = 64;  // inputs decoded at once for weights without groups

typedef float Vec __attribute__((vector_size(kWidth * 4), aligned(4)));

// Number of output vectors in a tile of R rows; the tile's sums fill about three quarters of the registers.
// Even a single row has enough independent sums to hide the latency of two multiply-adds per cycle.
template <int R>
constexpr int kVectors = kWidth == 16 ? 4
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
  // Adds one input's products: x of R rows times w of V vectors of outputs.
  __attribute__((always_inline)) void add(const float* x, const Vec (&w)[V]) {
    unrolled<R>([&](auto m) __attribute__((always_inline)) {
      const Vec value = broadcast(x[m]);
      unrolled<V>([&](auto v) __attribute__((always_inline)) { add_product(at[m][v], w[v], value); });
    });
  }
};

// Weights to be decoded next; their lines are prefetched one by one while other weights are multiplied,
// because decoding alone is too short to hide memory latency.
struct Fetch {
  const uint8_t* line;
  int lines;

  void one() {
    if (lines <= 0) return;
    __builtin_prefetch(line);
    line += 64;
    --lines;
  }
};

// Adds x[count][R] times w[count][strip of 64] to sums[R][strip of 64].
template <int R>
__attribute__((noinline)) void multiply_floats(const float* x, const float* w, int count, float* sums,
                                               Fetch next) {
  constexpr int V = kVectors<R>, kInputsPerLine = 4;
  Sums<R, V> tile(sums);
  for (int start = 0; start < count; start += kInputsPerLine) {
    next.one();
    const int end = start + kInputsPerLine < count ? start + kInputsPerLine : count;
    for (int k = start; k < end; ++k, w += kPanel) {
      Vec weight[V];
      unrolled<V>([&](auto v) __attribute__((always_inline)) {
        weight[v] = *reinterpret_cast<const Vec*>(w + v * kWidth);
      });
      tile.add(x + k * R, weight);
    }
  }
  tile.store(sums);
}

// Returns x as float32 in row tiles with zero padding, in thread_scratch slot 1.
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

// The row tiles of an item and their sums [rows][64].
struct Tiles {
  const RowTiles& tiles;
  const float* x;
  int inputs, first, last;
  float* sums;

  // Returns how many of `count` prefetches each tile issues.
  int share(int count) const { return (count + last - first - 1) / (last - first); }

  // Calls body(integral constant R, the tile's x at input k, its sums) for each row tile.
  template <class Body>
  void each(int k, Body&& body) const {
    for (int tile = first; tile < last; ++tile) {
      const int row = tiles.first(tile);
      with_rows<kTileRows>(tiles.size(tile), [&](auto size) {
        body(size, x + static_cast<std::size_t>(row) * inputs + static_cast<std::size_t>(k) * size,
             sums + static_cast<std::size_t>(row - tiles.first(first)) * kPanel);
      });
    }
  }
};

// Multiplies a panel block by block. A block is a group or some inputs.
void multiply_blocks(const PackedWeight& weight, int panel_index, const Tiles& tiles, float* decoded) {
  const PackedShape& shape = weight.shape;
  const uint8_t* const panel = weight.panel(panel_index);
  const int block = shape.quantized() ? shape.group : kBlockInputs;
  const std::size_t bytes =
      shape.quantized() ? shape.block_bytes() : kBlockInputs * kPanel * float_size(shape.scale_type);
  const uint8_t* following = panel + bytes;
  for (int k = 0; k < tiles.inputs; k += block, following += bytes) {
    const int count = std::min(tiles.inputs - k, block);
    const bool as_it_is = shape.kind == WeightKind::f32;
    if (!as_it_is) decode(weight, panel_index, k, count, decoded);
    const float* w = as_it_is ? reinterpret_cast<const float*>(panel) + k * kPanel : decoded;
    Fetch next{following, tiles.share(static_cast<int>(bytes / 64))};
    tiles.each(k, [&](auto size, const float* x, float* sums) {
      constexpr int R = decltype(size)::value, strip = kWidth * kVectors<R>, strips = kPanel / strip;
      Fetch part = next;
      part.lines = (next.lines + strips - 1) / strips;
      for (int c = 0; c < kPanel; c += strip, part.line += 64 * part.lines)
        multiply_floats<R>(x, w + c, count, sums + c, part);
      next.line += 64 * next.lines;
    });
  }
}

void run_item(const LinearCall& call, const float* x, const RowTiles& tiles, int panel_index, int first_tile,
              int last_tile) {
  const PackedShape& shape = call.weight->shape;
  const int first = tiles.first(first_tile), rows = tiles.first(last_tile) - first;
  const std::size_t decoded = static_cast<std::size_t>(std::max(shape.group, kBlockInputs)) * kPanel;
  float* w = static_cast<float*>(thread_scratch(sizeof(float) * (decoded + rows * kPanel)));
  float* sums = w + decoded;
  std::memset(sums, 0, sizeof(float) * kPanel * rows);
  multiply_blocks(*call.weight, panel_index, {tiles, x, shape.padded_inputs(), first_tile, last_tile, sums},
                  w);
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
