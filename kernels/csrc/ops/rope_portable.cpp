#include <cmath>
#include <cstring>

#include "ops/ops.h"
#include "ops/row_loops.h"
#include "runtime/threads.h"

namespace octavo::OCTAVO_ISA {
namespace {

// The values of one head before they are rotated.
void load_head(const RopeCall& call, std::size_t start, float* values) {
  if (call.weight == nullptr) return load_floats(call.x, call.type, start, call.size, values);
  const float factor = rms_factor(call.x, call.type, start, call.size, call.eps);
  for (int at = 0; at < call.size; at += kBlock) {
    const int n = call.size - at < kBlock ? call.size - at : kBlock;
    scale_block(call.x, call.type, start, call.weight, call.weight_type, at, n, factor, values + at);
  }
  round_floats(call.type, call.size, values);
}

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

#if defined(__AVX512BF16__)
constexpr int kMostInRegisters = 256;  // values of a head

// A bf16 head of 16 kVectors values that turns as a whole, halves with halves, in registers: the operations
// of load_head and rotate.
template <int kVectors>
void turn_head(const RopeCall& call, const bf16_t* x, const float* weights, const float* angles, bf16_t* y) {
  constexpr int kHalf = kVectors / 2;
  // The same head of the next token is asked for meanwhile: other threads computed it. (Past the last one,
  // nothing.)
  for (int i = 0; i < kVectors; i += 2) _mm_prefetch(x + call.strides[2] + 16 * i, _MM_HINT_T0);
  __m512 values[kVectors];
  for (int i = 0; i < kVectors; ++i) values[i] = load_bf16(x + 16 * i);
  if (weights != nullptr) {
    __m512 lanes = _mm512_setzero_ps();
    for (int i = 0; i < kVectors; ++i) lanes = _mm512_add_ps(lanes, _mm512_mul_ps(values[i], values[i]));
    const float mean = _mm512_reduce_add_ps(lanes) / static_cast<float>(16 * kVectors);
    const __m512 factor = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + call.eps));
    for (int i = 0; i < kVectors; ++i)
      values[i] =
          round_to_bf16(_mm512_mul_ps(_mm512_mul_ps(values[i], factor), _mm512_loadu_ps(weights + 16 * i)));
  }
  for (int i = 0; i < kHalf; ++i) {
    const __m512 cosine = _mm512_loadu_ps(angles + 16 * i), sine = _mm512_loadu_ps(angles + 16 * (kHalf + i));
    const __m512 a = values[i], b = values[i + kHalf];
    values[i] = _mm512_sub_ps(_mm512_mul_ps(a, cosine), _mm512_mul_ps(b, sine));
    values[i + kHalf] = _mm512_add_ps(_mm512_mul_ps(a, sine), _mm512_mul_ps(b, cosine));
  }
  for (int i = 0; i < kVectors; i += 2) store_pair(values[i], values[i + 1], y + 16 * i);
}

// Which heads a call has turned in registers: those of usual sizes.
class HeadsInRegisters {
 public:
  explicit HeadsInRegisters(const RopeCall& call) : call_(call) {
    if (call.type != Float::bf16 || call.dims != call.size || call.interleaved || call.scale != 1.0f) return;
    if (call.size == 64) turn_ = turn_head<4>;
    if (call.size == 96) turn_ = turn_head<6>;
    if (call.size == 128) turn_ = turn_head<8>;
    if (call.size == kMostInRegisters) turn_ = turn_head<16>;
    if (turn_ != nullptr && call.weight != nullptr)
      load_floats(call.weight, call.weight_type, 0, call.size, weights_);
  }

  // The head from element `from` of x on, to element `to` of y; false where it is left to do.
  bool turn(std::size_t from, const float* angles, std::size_t to) const {
    if (turn_ == nullptr) return false;
    const bf16_t* const x = static_cast<const bf16_t*>(call_.x) + from;
    turn_(call_, x, call_.weight != nullptr ? weights_ : nullptr, angles, static_cast<bf16_t*>(call_.y) + to);
    return true;
  }

 private:
  const RopeCall& call_;
  void (*turn_)(const RopeCall&, const bf16_t*, const float*, const float*, bf16_t*) = nullptr;
  float weights_[kMostInRegisters];
};
#else
struct HeadsInRegisters {
  explicit HeadsInRegisters(const RopeCall&) {}
  bool turn(std::size_t, const float*, std::size_t) const { return false; }
};
#endif

}  // namespace

void rope(const RopeCall& call) {
  const int tokens = call.batch * call.length;
  const std::size_t token_bytes = float_size(call.type) * call.size * call.heads;
  const int per_item = static_cast<int>(kItemBytes / 2 / (token_bytes + 1)) + 1;
  parallel_for((tokens + per_item - 1) / per_item, [&](int item) {
    float* const values = static_cast<float*>(thread_scratch(sizeof(float) * call.size));
    const HeadsInRegisters in_registers(call);
    const int last = (item + 1) * per_item < tokens ? (item + 1) * per_item : tokens;
    for (int token = item * per_item; token < last; ++token) {
      const int b = token / call.length, l = token % call.length;
      const float* const angles = call.angles + b * call.angle_stride + static_cast<int64_t>(l) * call.dims;
      for (int h = 0; h < call.heads; ++h) {
        const std::size_t from = b * call.strides[0] + h * call.strides[1] + l * call.strides[2];
        const std::size_t to = ((static_cast<std::size_t>(b) * call.heads + h) * call.length + l) * call.size;
        if (in_registers.turn(from, angles, to)) continue;
        load_head(call, from, values);
        rotate(call, angles, values);
        store_floats(call.y, call.type, to, call.size, values);
      }
    }
  });
}

// libm's functions: exact range reduction matters at large positions, and this runs once per step.
void rope_angles(const AngleCall& call) {
  const int tokens = call.batch * call.length;
  parallel_for((tokens + 15) / 16, [&](int item) {
    const int last = (item + 1) * 16 < tokens ? (item + 1) * 16 : tokens;
    for (int token = item * 16; token < last; ++token) {
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
