// Quantization to one scale per output channel, row by row, so that only one row is in a wider type.
#include "linear/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "linear/quantize_vectors.h"
#include "runtime/round_floats.h"
#include "runtime/row_items.h"
#include "runtime/threads.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kItemWeights = 32 << 10;

// Dequantizes a group of MLX's affine format, bit-identical to mx.dequantize: each operation rounds to the
// type.
void dequantize(const QuantizeCall& call, std::size_t g, float* values) {
  const uint32_t mask = (1u << call.bits) - 1;
  const int per_word = 32 / call.bits;
  const uint32_t* const words = static_cast<const uint32_t*>(call.weights) + g * (call.group / per_word);
  float scale, bias;
  load_floats(call.scales, call.type, g, 1, &scale);
  load_floats(call.biases, call.type, g, 1, &bias);
  for (int j = 0; j < call.group; ++j) {
    const uint32_t code = words[j / per_word] >> j % per_word * call.bits & mask;
    values[j] = static_cast<float>(static_cast<int32_t>(code)) * scale;
  }
  round_floats(call.type, call.group, values);
  for (int j = 0; j < call.group; ++j) values[j] += bias;
  round_floats(call.type, call.group, values);
}

void load_row(const QuantizeCall& call, int64_t row, float* values) {
  const std::size_t first = static_cast<std::size_t>(row) * call.inputs;
  if (call.scales == nullptr) return load_floats(call.weights, call.type, first, call.inputs, values);
  for (int j = 0; j < call.inputs; j += call.group) dequantize(call, (first + j) / call.group, values + j);
}

// Returns the largest magnitude, or NaN if there is one: bits of NaN are larger than those of any number.
float largest_of(const float* values, int count) {
  IntVec largest{};
  for (int j = 0; j < count; j += kLanes) {
    const IntVec magnitude = (IntVec)load(values + j) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  int32_t result = 0;
  for (int i = 0; i < kLanes; ++i) result = std::max(result, largest[i]);
  return as_float(static_cast<uint32_t>(result));
}

// Quantizes one row to 8 bits (w8a8). `scales`, `biases`: the parameters of its groups, as float32.
void quantize_row(const QuantizeCall& call, const float* values, uint8_t* codes, float* scales,
                  float* biases) {
  float scale = largest_of(values, call.inputs) / 127;
  round_floats(call.type, 1, &scale);
  const float factor = scale > 0 ? 1 / scale : 0;
  for (int j = 0; j < call.inputs; j += kLanes) {
    const Vec exact = load(values + j) * factor;
    const UintVec shifted = (UintVec)(clamp(exact, -127, 127) + (kRound + 128));
    store_bytes(codes + j, shifted & (UintVec)(exact == exact) & 0xff);  // 0 for NaN
  }
  std::fill_n(scales, call.inputs / call.group, scale);
  std::fill_n(biases, call.inputs / call.group, -128 * scale);
}

struct Range {
  float least, most;  // extremes of the group's values and 0
};

Range range_of(const float* values, int count) {
  Vec least{}, most{};
  for (int j = 0; j < count; j += kLanes) {
    const Vec x = load(values + j);
    least = x < least ? x : least;
    most = x > most ? x : most;
  }
  return {least_of(least), -least_of(-most)};
}

// Quantizes one row to 4 bits per weight, with two levels of scales (w4a8).
void quantize_row_twice(const QuantizeCall& call, const float* values, uint8_t* codes, float* scales,
                        float* biases) {
  const int group = call.group, groups = call.inputs / group;
  float *const least = scales, *const most = biases;  // the groups' extremes at first
  float unit = 0x1p-24f;
  for (int g = 0; g < groups; ++g) {
    const Range range = range_of(values + g * group, group);
    least[g] = range.least;
    most[g] = range.most;
    unit = std::max(unit, (range.most - range.least) / 15 / 16);
    unit = std::max(unit, std::max(range.most, -range.least) / 115);
  }
  if (std::isnan(largest_of(values, call.inputs))) unit = std::numeric_limits<float>::quiet_NaN();
  const float scale = std::pow(2.0f, std::ceil(std::log2(unit)));
  for (int g = 0; g < groups; ++g) {
    const float times = std::rint((most[g] - least[g]) / 15 / scale);
    const float step = (times < 1 ? 1 : times) * scale;
    const float exact = std::rint(7.5f - (least[g] + most[g]) / (2 * step));
    const float zero = exact <= 0 ? 0 : exact > 15 ? 15 : exact;
    store_codes<4>(values + g * group, group, codes + g * (group / 2), [&](Vec x) {
      return x / step + kRound - kRound + zero;  // larger values are clamped
    });
    scales[g] = step;
    biases[g] = -zero * step;
  }
}

}  // namespace

void quantize_channels(const QuantizeCall& call) {
  const int groups = call.inputs / call.group, words = call.inputs / (32 / call.bits);
  for_row_items(call.rows, kItemWeights / call.inputs + 1, [&](int64_t first, int64_t last) {
    const std::size_t floats = static_cast<std::size_t>(call.inputs) + 2 * groups;
    float* const values = static_cast<float*>(thread_scratch(sizeof(float) * floats));
    float *const scales = values + call.inputs, *const biases = scales + groups;
    for (int64_t row = first; row < last; ++row) {
      load_row(call, row, values);
      uint8_t* const codes = reinterpret_cast<uint8_t*>(call.new_codes + row * words);
      if (call.bits == 8) quantize_row(call, values, codes, scales, biases);
      else quantize_row_twice(call, values, codes, scales, biases);
      store_floats(call.new_scales, call.type, static_cast<std::size_t>(row) * groups, groups, scales);
      store_floats(call.new_biases, call.type, static_cast<std::size_t>(row) * groups, groups, biases);
    }
  });
}

}  // namespace octavo::OCTAVO_ISA
