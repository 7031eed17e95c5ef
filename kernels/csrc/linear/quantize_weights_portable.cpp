// Quantization of weights to MLX's affine format, some groups at a time on each thread.
#include "linear/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "linear/quantize_vectors.h"
#include "runtime/row_items.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kItemGroups = 512;  // groups per item

struct Scale {
  float step, edge;
};

// Chooses scale and bias like MLX: `edge`, the extreme value farther from zero, and zero itself are
// represented exactly.
template <int kGroup>
Scale choose_scale(const float* values, float largest_code) {
  Vec low = Vec{} + std::numeric_limits<float>::infinity(), high = -low;
  for (int j = 0; j < kGroup; j += kLanes) {  // NaNs are ignored
    const Vec x = load(values + j);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  const float least = least_of(low), most = -least_of(-high);
  const bool from_least = std::abs(least) > std::abs(most);
  const float width = std::max((most - least) / largest_code, 1e-7f);
  const float step = from_least ? width : -width, edge = from_least ? least : most;
  const float code = std::rint(edge / step);
  return code != 0 ? Scale{edge / code, edge} : Scale{step, 0};
}

template <int kGroup, int kBits>
void quantize_groups(const QuantizeCall& call, int64_t first, int64_t last) {
  constexpr float kLargest = (1 << kBits) - 1;
  float values[kGroup], steps[kItemGroups], edges[kItemGroups];
  uint8_t codes[kGroup];
  uint8_t* to = reinterpret_cast<uint8_t*>(call.new_codes) + first * (kGroup * kBits / 8);
  for (int64_t g = first; g < last; ++g, to += kGroup * kBits / 8) {
    load_floats(call.weights, call.type, static_cast<std::size_t>(g) * kGroup, kGroup, values);
    const Scale scale = choose_scale<kGroup>(values, kLargest);
    for (int j = 0; j < kGroup; j += kLanes) {
      const Vec code = (load(values + j) - scale.edge) / scale.step;
      store_bytes(codes + j, rounded(clamp(code, 0, kLargest)));
    }
    pack_codes<kGroup, kBits>(codes, to);
    steps[g - first] = scale.step;
    edges[g - first] = scale.edge;
  }
  const int count = static_cast<int>(last - first);
  store_floats(call.new_scales, call.type, static_cast<std::size_t>(first), count, steps);
  store_floats(call.new_biases, call.type, static_cast<std::size_t>(first), count, edges);
}

template <int kGroup>
void quantize(const QuantizeCall& call) {
  for_row_items(call.rows * (call.inputs / kGroup), kItemGroups, [&](int64_t first, int64_t last) {
    if (call.bits == 8) quantize_groups<kGroup, 8>(call, first, last);
    else if (call.bits == 4) quantize_groups<kGroup, 4>(call, first, last);
    else quantize_groups<kGroup, 2>(call, first, last);
  });
}

}  // namespace

void quantize_weights(const QuantizeCall& call) {
  if (call.group == 32) quantize<32>(call);
  else if (call.group == 64) quantize<64>(call);
  else quantize<128>(call);
}

}  // namespace octavo::OCTAVO_ISA
