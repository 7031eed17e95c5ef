// y = x W^T in float32 for every kind of weight and every instruction set, in standard C++ with GCC vectors.
//
// Each sum runs over the inputs in ascending order, with one multiply-add per input (fused if there is FMA).
// Weights are decoded to float32 once for all rows of an item. Most kinds are decoded one block of a panel at
// a time. bf16 is decoded in strips of few outputs, as many as have their sums in registers, so that many
// inputs of a strip stay in L1. For a few rows, bf16 weights are widened in registers instead.
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
constexpr int kItemTiles = 16;      // row tiles that share a decoded chunk
constexpr int kStripFloats = 4096;  // floats decoded at once
constexpr int kBlockInputs = 64;    // inputs decoded at once for weights without groups or strips
constexpr int kWidenedRows = 12;    // most rows for which bf16 weights are widened in registers
constexpr int kAhead = 4096;        // prefetch distance in bytes

typedef float Vec __attribute__((vector_size(kWidth * 4), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4), aligned(4)));

// Number of vectors of outputs in a tile of R rows, whose sums fill about three quarters of the registers.
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
  std::size_t stride;
  int lines;

  void one() {
    if (lines <= 0) return;
    __builtin_prefetch(line);
    line += stride;
    --lines;
  }
};

// Adds x[count][R] times w[count][strip] to sums[R][strip of 64]; rows of w are `stride` apart.
template <int R>
__attribute__((noinline)) void multiply_floats(const float* x, const float* w, int stride, int count,
                                               float* sums, Fetch next) {
  constexpr int V = kVectors<R>, kInputsPerLine = 4;
  Sums<R, V> tile(sums);
  for (int start = 0; start < count; start += kInputsPerLine) {
    next.one();
    const int end = start + kInputsPerLine < count ? start + kInputsPerLine : count;
    for (int k = start; k < end; ++k, w += stride) {
      Vec weight[V];
      unrolled<V>([&](auto v) __attribute__((always_inline)) {
        weight[v] = *reinterpret_cast<const Vec*>(w + v * kWidth);
      });
      tile.add(x + k * R, weight);
    }
  }
  tile.store(sums);
}

// Return the first, or the second, bf16 of each pair as floats.
inline Vec first_of_pairs(const uint32_t* words) {
  return reinterpret_cast<Vec>(*reinterpret_cast<const Words*>(words) << 16);
}
inline Vec second_of_pairs(const uint32_t* words) {
  return reinterpret_cast<Vec>(*reinterpret_cast<const Words*>(words) & 0xffff0000);
}

// Does the same as multiply_floats for w in bf16 pairs [count / 2][64][2], which it widens in registers.
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

// Converts `width` outputs of bf16 pairs [count][64][2] to float32 [2 count][width].
template <int width>
void widen_strip(const uint32_t* words, int count, float* out) {
  for (int pair = 0; pair < count; ++pair, words += kPanel, out += 2 * width)
    unrolled<width / kWidth>([&](auto v) __attribute__((always_inline)) {
      *reinterpret_cast<Vec*>(out + v * kWidth) = first_of_pairs(words + v * kWidth);
      *reinterpret_cast<Vec*>(out + width + v * kWidth) = second_of_pairs(words + v * kWidth);
    });
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

  // Calls body(integral constant R, x of the tile from input k on, its sums) for each row tile.
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

// Multiplies weights other than bf16, block by block of a panel. A block is a group or some inputs.
void multiply_blocks(const PackedWeight& weight, int panel_index, const Tiles& tiles, float* decoded) {
  const PackedShape& shape = weight.shape;
  const uint8_t* const panel = weight.panel(panel_index);
  const int block = shape.quantized() ? shape.group : kBlockInputs;
  const std::size_t bytes =
      shape.quantized() ? shape.block_bytes() : kBlockInputs * kPanel * float_size(shape.scale_type);
  const uint8_t* following = panel + bytes;
  for (int k = 0; k < tiles.inputs; k += block, following += bytes) {
    const int count = tiles.inputs - k < block ? tiles.inputs - k : block;
    const bool as_it_is = shape.kind == WeightKind::f32;
    if (!as_it_is) decode(weight, panel_index, k, count, decoded);
    const float* w = as_it_is ? reinterpret_cast<const float*>(panel) + k * kPanel : decoded;
    Fetch next{following, 64, tiles.share(static_cast<int>(bytes / 64))};
    tiles.each(k, [&](auto size, const float* x, float* sums) {
      constexpr int R = decltype(size)::value, strip = kWidth * kVectors<R>, strips = kPanel / strip;
      Fetch part = next;
      part.lines = (next.lines + strips - 1) / strips;
      for (int c = 0; c < kPanel; c += strip, part.line += part.lines * part.stride)
        multiply_floats<R>(x, w + c, kPanel, count, sums + c, part);
      next.line += next.lines * next.stride;
    });
  }
}

// Multiplies bf16 weights in strips of a panel.
template <int width>
void multiply_strips(const uint8_t* panel, const Tiles& tiles, float* w) {
  constexpr int chunk = kStripFloats / width;
  constexpr std::size_t kPairBytes = 4 * kPanel;
  for (int k = 0; k < tiles.inputs; k += chunk, panel += chunk / 2 * kPairBytes) {
    const int count = tiles.inputs - k < chunk ? tiles.inputs - k : chunk;
    for (int c = 0; c < kPanel; c += width) {
      widen_strip<width>(reinterpret_cast<const uint32_t*>(panel) + c, count / 2, w);
      const uint8_t* following =
          c + width < kPanel ? panel + 4 * (c + width) : panel + count / 2 * kPairBytes;
      Fetch next{following, kPairBytes, tiles.share(count / 2)};
      tiles.each(k, [&](auto size, const float* x, float* sums) {
        multiply_floats<decltype(size)::value>(x, w, width, count, sums + c, next);
        next.line += next.lines * next.stride;
      });
    }
  }
}

// Multiplies bf16 weights, widened in registers.
void multiply_words(const uint8_t* panel, const Tiles& tiles) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(panel);
  for (int k = 0; k < tiles.inputs; k += kBlockInputs, words += kBlockInputs / 2 * kPanel) {
    const int count = tiles.inputs - k < kBlockInputs ? tiles.inputs - k : kBlockInputs;
    tiles.each(k, [&](auto size, const float* x, float* sums) {
      multiply_pairs<decltype(size)::value>(x, words, count, sums);
    });
  }
}

void run_item(const LinearCall& call, const float* x, const RowTiles& tiles, int panel_index, int first_tile,
              int last_tile) {
  const PackedShape& shape = call.weight->shape;
  const int first = tiles.first(first_tile), rows = tiles.first(last_tile) - first;
  const std::size_t decoded = std::max(kStripFloats, std::max(shape.group, kBlockInputs) * kPanel);
  float* w = static_cast<float*>(thread_scratch(sizeof(float) * (decoded + rows * kPanel)));
  float* sums = w + decoded;
  std::memset(sums, 0, sizeof(float) * kPanel * rows);
  const uint8_t* panel = call.weight->panel(panel_index);
  const Tiles item{tiles, x, shape.padded_inputs(), first_tile, last_tile, sums};
  if (shape.kind != WeightKind::bf16) multiply_blocks(*call.weight, panel_index, item, w);
  else if (rows <= kWidenedRows) multiply_words(panel, item);
  else multiply_strips<kWidth * kVectors<kTileRows>>(panel, item, w);
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
