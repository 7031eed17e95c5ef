#include <cmath>
#include <cstring>

#include "ops/ops.h"
#include "ops/row_loops.h"
#include "runtime/row_items.h"

namespace octavo::OCTAVO_ISA {
namespace {

void rotate(const RopeCall& call, const float* angles, float* values) {
  const int half = call.dims / 2;
  if (call.scale != 1.0f) {
    for (int i = 0; i < call.dims; ++i) values[i] *= call.scale;
    round_floats(call.type, call.dims, values);
  }
  const int first = call.interleaved ? 2 : 1, second = call.interleaved ? 1 : half;
  for (int i = 0; i < half; ++i) {
    const float cosine = angles[i], sine = angles[half + i];
    const float a = values[i * first], b = values[i * first + second];
    values[i * first] = a * cosine - b * sine;
    values[i * first + second] = a * sine + b * cosine;
  }
}

}  // namespace

void rope(const RopeCall& call) {
  const int tokens = call.batch * call.length;
  const std::size_t token_bytes = float_size(call.type) * call.size * call.heads;
  const int per_item = static_cast<int>(kItemBytes / 2 / (token_bytes + 1)) + 1;
  for_row_items(tokens, per_item, [&](int first, int last) {
    float* const values = static_cast<float*>(thread_scratch(sizeof(float) * call.size));
    for (int token = first; token < last; ++token) {
      const int b = token / call.length, l = token % call.length;
      const float* const angles = call.angles + b * call.angle_stride + static_cast<int64_t>(l) * call.dims;
      const std::size_t from = b * call.strides[0] + l * call.strides[2];
      const std::size_t to = (static_cast<std::size_t>(b) * call.heads * call.length + l) * call.size;
      for (int h = 0; h < call.heads; ++h) {
        load_floats(call.x, call.type, from + h * call.strides[1], call.size, values);
        rotate(call, angles, values);
        store_floats(call.y, call.type, to + static_cast<std::size_t>(h) * call.length * call.size, call.size,
                     values);
      }
    }
  });
}

// Uses libm, because angles at large positions need exact range reduction, and this runs once per step.
void rope_angles(const AngleCall& call) {
  const int tokens = call.batch * call.length;
  for_row_items(tokens, 16, [&](int first, int last) {
    for (int token = first; token < last; ++token) {
      const int position = call.offsets[token / call.length] + token % call.length;
      const float scaled = static_cast<float>(position) * call.position_scale;
      float* const y = call.y + static_cast<int64_t>(token) * 2 * call.half;
      for (int i = 0; i < call.half; ++i) {
        const float angle = scaled * call.inverse_frequencies[i];
        y[i] = cosf(angle);
        y[call.half + i] = sinf(angle);
      }
    }
  });
}

}  // namespace octavo::OCTAVO_ISA
