// Quantization of weights to MLX's affine format, some groups at a time on each thread.
#include "linear/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "linear/quantize_vectors.h"
#include "runtime/row_items.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kMaxGroup = 128;
constexpr int64_t kItemGroups = 512;  // groups per item

struct Scale {
  float step, edge;
};

// Chooses scale and bias like MLX: `edge`, the extreme value farther from zero, and zero itself are
// represented exactly.
Scale choose_scale(const float* values, int group, float largest_code) {
  Vec low = Vec{} + std::numeric_limits<float>::infinity(), high = -low;
  for (int j = 0; j < group; j += kLanes) {  // NaNs are ignored
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

template <int kBits>
void quantize_groups(const QuantizeCall& call, int64_t first, int64_t last) {
  float values[kMaxGroup], steps[kItemGroups], edges[kItemGroups];
  const int group = call.group, bytes = group * kBits / 8;
  uint8_t* to = reinterpret_cast<uint8_t*>(call.new_codes) + first * bytes;
  for (int64_t g = first; g < last; ++g, to += bytes) {
    load_floats(call.weights, call.type, static_cast<std::size_t>(g) * group, group, values);
    const Scale scale = choose_scale(values, group, (1 << kBits) - 1);
    store_codes<kBits>(values, group, to, [&](Vec x) { return (x - scale.edge) / scale.step; });
    steps[g - first] = scale.step;
    edges[g - first] = scale.edge;
  }
  const int count = static_cast<int>(last - first);
  store_floats(call.new_scales, call.type, static_cast<std::size_t>(first), count, steps);
  store_floats(call.new_biases, call.type, static_cast<std::size_t>(first), count, edges);
}

}  // namespace

void quantize_weights(const QuantizeCall& call) {
  for_row_items(call.rows * (call.inputs / call.group), kItemGroups, [&](int64_t first, int64_t last) {
    if (call.bits == 8) quantize_groups<8>(call, first, last);
    else quantize_groups<4>(call, first, last);
  });
}

}  // namespace octavo::OCTAVO_ISA
