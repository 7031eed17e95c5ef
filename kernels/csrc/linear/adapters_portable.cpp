// y += scale (x A) B for rows that have adapters, in standard C++ with GCC vectors.
//
// A product of x with a row of A is computed as 16 sums. Each sum takes every 16th input in order, and the
// sums are then added as a tree. Each output adds its products in the order of ranks. So a row's bits do not
// depend on other rows.
#include <algorithm>

#include "linear/adapter_rows.h"
#include "runtime/threads.h"
#include "runtime/unrolled.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // 16-lane vectors are only passed to inlined functions

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLanes = 16;
constexpr int kOutputBlock = 512;  // outputs per item
#if defined(__AVX512F__)
constexpr int kTile = 4;  // rows by ranks (or by vectors of outputs) whose sums fit into registers
#else
constexpr int kTile = 2;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2), aligned(2)));

inline __attribute__((always_inline)) Vec load(const float* from) {
  return *reinterpret_cast<const Vec*>(from);
}
inline __attribute__((always_inline)) Vec load(const bf16_t* from) {
  const Words words = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16;
  return reinterpret_cast<Vec>(words);
}

inline __attribute__((always_inline)) float add_lanes(const Vec& sum) {
  float lanes[kLanes];
  *reinterpret_cast<Vec*>(lanes) = sum;
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Computes z = scale * x . a for R rows and Q ranks, over `size` values, which are whole vectors.
template <int R, int Q, class F>
void multiply_rows(const float* x, const F* a, int size, int a_stride, float scale, float* z, int z_stride) {
  Vec sums[R][Q] = {};
  for (int i = 0; i < size; i += kLanes) {
    Vec rows[Q];
    unrolled<Q>([&](auto q) __attribute__((always_inline)) { rows[q] = load(a + q * a_stride + i); });
    unrolled<R>([&](auto r) __attribute__((always_inline)) {
      const Vec values = load(x + r * size + i);
      unrolled<Q>([&](auto q) __attribute__((always_inline)) { sums[r][q] += values * rows[q]; });
    });
  }
  unrolled<R * Q>([&](auto i) __attribute__((always_inline)) {
    z[i / Q * z_stride + i % Q] = scale * add_lanes(sums[i / Q][i % Q]);
  });
}

template <int R, class F>
void multiply_ranks(const float* x, const F* a, const AdapterFactors& factors, float* z) {
  int q = 0;
  const int size = factors.a_stride, rank = factors.rank;
  for (; q + kTile <= rank; q += kTile)
    multiply_rows<R, kTile>(x, a + static_cast<std::size_t>(q) * size, size, size, factors.scale, z + q,
                            rank);
  for (; q < rank; ++q)
    multiply_rows<R, 1>(x, a + static_cast<std::size_t>(q) * size, size, size, factors.scale, z + q, rank);
}

// Computes sums of z b over `rank` products, for R rows and V vectors of outputs.
template <int R, int V, class F>
void multiply_outputs(const float* z, int rank, const F* b, int b_stride, float* to) {
  Vec sums[R][V] = {};
  for (int k = 0; k < rank; ++k, b += b_stride) {
    Vec values[V];
    unrolled<V>([&](auto v) __attribute__((always_inline)) { values[v] = load(b + v * kLanes); });
    unrolled<R>([&](auto r) __attribute__((always_inline)) {
      const Vec factor = z[r * rank + k] - Vec{};
      unrolled<V>([&](auto v) __attribute__((always_inline)) { sums[r][v] += factor * values[v]; });
    });
  }
  unrolled<R * V>([&](auto i) __attribute__((always_inline)) {
    *reinterpret_cast<Vec*>(to + i / V * kOutputBlock + i % V * kLanes) = sums[i / V][i % V];
  });
}

template <int R, class F>
void multiply_block(const float* z, int rank, const F* b, int b_stride, int count, float* to) {
  int o = 0;
  for (; o + kTile * kLanes <= count; o += kTile * kLanes)
    multiply_outputs<R, kTile>(z, rank, b + o, b_stride, to + o);
  for (; o < count; o += kLanes) multiply_outputs<R, 1>(z, rank, b + o, b_stride, to + o);
}

template <class F>
void multiply_a(const AdapterCall& call, const AdapterGroup& group) {
  const AdapterFactors& factors = *group.factors;
  const int size = factors.a_stride;
  float* x = static_cast<float*>(thread_scratch(sizeof(float) * size * group.count));
  for (int r = 0; r < group.count; ++r) {
    const std::size_t row = call.order[group.first + r];
    const std::size_t offset = call.x_offsets ? call.x_offsets[row] : row * call.inputs;
    load_floats(call.x, call.x_type, offset, call.inputs, x + r * size);
    std::fill(x + r * size + call.inputs, x + (r + 1) * size, 0.0f);
  }
  const F* a = reinterpret_cast<const F*>(factors.a.get()) +
               static_cast<std::size_t>(group.expert) * factors.rank * factors.a_stride;
  float* z = call.z + group.z;
  int r = 0;
  for (; r + kTile <= group.count; r += kTile)
    multiply_ranks<kTile>(x + r * size, a, factors, z + r * factors.rank);
  for (; r < group.count; ++r) multiply_ranks<1>(x + r * size, a, factors, z + r * factors.rank);
}

// Adds `count` sums to outputs [start, start + count) of a row, with gain and bias.
void finish(const AdapterCall& call, const AdapterGroup& group, int row, int start, int count,
            const float* sums) {
  const AdapterFactors& factors = *group.factors;
  float y[kOutputBlock];
  const std::size_t at = static_cast<std::size_t>(row) * call.y_stride + group.part_offset + start;
  load_floats(call.y, call.y_type, at, count, y);
  if (factors.gain.empty()) {
    for (int o = 0; o < count; ++o) y[o] += sums[o];
  } else {
    const float* gain = factors.gain.data() + start;
    const float* bias = factors.bias.empty() ? nullptr : factors.bias.data() + start;
    for (int o = 0; o < count; ++o) {
      const float shift = bias ? bias[o] : 0.0f;
      y[o] = gain[o] * (y[o] - shift + sums[o]) + shift;
    }
  }
  store_floats(call.y, call.y_type, at, count, y);
}

template <class F>
void multiply_b(const AdapterCall& call, const AdapterGroup& group, int start) {
  const AdapterFactors& factors = *group.factors;
  const int count = std::min(kOutputBlock, factors.outputs - start);
  const F* b = reinterpret_cast<const F*>(factors.b.get()) +
               static_cast<std::size_t>(group.expert) * factors.rank * factors.b_stride + start;
  const float* z = call.z + group.z;
  float sums[kTile * kOutputBlock];
  int r = 0;
  for (; r + kTile <= group.count; r += kTile) {
    multiply_block<kTile>(z + r * factors.rank, factors.rank, b, factors.b_stride, count, sums);
    for (int i = 0; i < kTile; ++i)
      finish(call, group, call.order[group.first + r + i], start, count, sums + i * kOutputBlock);
  }
  for (; r < group.count; ++r) {
    multiply_block<1>(z + r * factors.rank, factors.rank, b, factors.b_stride, count, sums);
    finish(call, group, call.order[group.first + r], start, count, sums);
  }
}

}  // namespace

void add_groups(const AdapterCall& call) {
  parallel_for(call.num_groups, [&](int i) {
    const AdapterGroup& group = call.groups[i];
    if (group.factors->type == Float::bf16) multiply_a<bf16_t>(call, group);
    else multiply_a<float>(call, group);
  });
  int most = 0;
  for (int i = 0; i < call.num_groups; ++i) most = std::max(most, call.groups[i].factors->outputs);
  const int blocks = (most + kOutputBlock - 1) / kOutputBlock;
  parallel_for(call.num_groups * blocks, [&](int item) {
    const AdapterGroup& group = call.groups[item / blocks];
    const int start = item % blocks * kOutputBlock;
    if (start >= group.factors->outputs) return;
    if (group.factors->type == Float::bf16) multiply_b<bf16_t>(call, group, start);
    else multiply_b<float>(call, group, start);
  });
}

}  // namespace octavo::OCTAVO_ISA
