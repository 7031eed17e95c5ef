#include "ops.h"

#include "threads.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kLanes = 16;   // partial sums of a reduction, the same on every instruction set
constexpr int kBlock = 256;  // values converted at once, on the stack
constexpr std::size_t kItemBytes = 32 << 10;  // of one operand: less is not worth waking a thread for

// Cephes' expf: 2^n times a degree-5 polynomial on [-ln2 / 2, ln2 / 2], relative error below 2e-7.
// Written out because a call to libm would keep the loop scalar.
inline float exp_float(float x) {
  x = x > 88.0f ? 88.0f : (x < -87.0f ? -87.0f : x);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = x * 1.44269504088896341f + magic;
  const float n = shifted - magic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * as_float((as_bits(shifted) << 23) + 0x3f800000);
}

float sum_of_squares(const void* x, Float type, std::size_t start, int size) {
  float lanes[kLanes] = {}, values[kBlock];
  for (int at = 0; at < size; at += kBlock) {
    const int count = size - at < kBlock ? size - at : kBlock;
    load_floats(x, type, start + at, count, values);
    int i = 0;
    for (; i + kLanes <= count; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += values[i + lane] * values[i + lane];
    for (int lane = 0; i + lane < count; ++lane) lanes[lane] += values[i + lane] * values[i + lane];
  }
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

}  // namespace

void rms_norm(const void* x, const void* weight, void* y, Float type, Float weight_type, int rows, int size,
              float eps) {
  const std::size_t row_bytes = float_size(type) * size;
  const int per_item = static_cast<int>(kItemBytes / (row_bytes + 1)) + 1;
  parallel_for((rows + per_item - 1) / per_item, [&](int item) {
    const int last = (item + 1) * per_item < rows ? (item + 1) * per_item : rows;
    for (int row = item * per_item; row < last; ++row) {
      const std::size_t start = static_cast<std::size_t>(row) * size;
      const float mean = sum_of_squares(x, type, start, size) / static_cast<float>(size);
      const float factor = 1.0f / __builtin_sqrtf(mean + eps);
      float values[kBlock], weights[kBlock];
      for (int at = 0; at < size; at += kBlock) {
        const int count = size - at < kBlock ? size - at : kBlock;
        load_floats(x, type, start + at, count, values);
        for (int i = 0; i < count; ++i) values[i] *= factor;
        if (weight != nullptr) {
          load_floats(weight, weight_type, at, count, weights);
          for (int i = 0; i < count; ++i) values[i] *= weights[i];
        }
        store_floats(y, type, start + at, count, values);
      }
    }
  });
}

void swiglu(const void* gate, const void* up, void* y, Float type, std::size_t count) {
  const std::size_t per_item = kItemBytes / float_size(type);
  parallel_for(static_cast<int>((count + per_item - 1) / per_item), [&](int item) {
    const std::size_t first = item * per_item;
    const std::size_t last = first + per_item < count ? first + per_item : count;
    float gates[kBlock], ups[kBlock];
    for (std::size_t at = first; at < last; at += kBlock) {
      const int n = static_cast<int>(last - at < kBlock ? last - at : kBlock);
      load_floats(gate, type, at, n, gates);
      load_floats(up, type, at, n, ups);
      for (int i = 0; i < n; ++i) gates[i] = gates[i] / (1.0f + exp_float(-gates[i])) * ups[i];
      store_floats(y, type, at, n, gates);
    }
  });
}

}  // namespace octavo::OCTAVO_ISA
