#include <cmath>
#include <cstring>

#include "ops/ops.h"
#include "ops/row_loops.h"
#include "runtime/row_items.h"

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

// Whether any of a head's values is subnormal, which VCVTNEPS2BF16 takes for zero: found once for all.
template <int kVectors>
inline bool any_subnormal(const __m512 (&values)[kVectors]) {
  constexpr int kSubnormal = 0x20;
  __mmask16 any = 0;
  for (int i = 0; i < kVectors; ++i) any |= _mm512_fpclass_ps_mask(values[i], kSubnormal);
  return any != 0;
}

// round_to_bf16 of all vectors.
template <int kVectors>
inline void round_all(__m512 (&values)[kVectors]) {
  if (any_subnormal(values)) {
    for (__m512& value : values) value = round_to_bf16(value);
    return;
  }
  for (__m512& value : values)
    value =
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value)), 16));
}

// The same as bf16 values to y.
template <int kVectors>
inline void store_all(const __m512 (&values)[kVectors], bf16_t* y) {
  if (any_subnormal(values)) {
    for (int i = 0; i < kVectors; i += 2) store_pair(values[i], values[i + 1], y + 16 * i);
    return;
  }
  for (int i = 0; i < kVectors; i += 2)
    _mm512_storeu_si512(y + 16 * i, (__m512i)_mm512_cvtne2ps_pbh(values[i + 1], values[i]));
}

// A bf16 head of 16 kVectors values that turns as a whole, halves with halves, in registers: the operations
// of rotate, after those of load_head by its factor where there are weights.
template <int kVectors>
inline void turn_head(const bf16_t* x, const float* weights, float factor, const float* angles, bf16_t* y) {
  constexpr int kHalf = kVectors / 2;
  __m512 values[kVectors];
  for (int i = 0; i < kVectors; ++i) values[i] = load_bf16(x + 16 * i);
  if (weights != nullptr) {
    const __m512 by = _mm512_set1_ps(factor);
    for (int i = 0; i < kVectors; ++i)
      values[i] = _mm512_mul_ps(_mm512_mul_ps(values[i], by), _mm512_loadu_ps(weights + 16 * i));
    round_all(values);
  }
  for (int i = 0; i < kHalf; ++i) {
    const __m512 cosine = _mm512_loadu_ps(angles + 16 * i), sine = _mm512_loadu_ps(angles + 16 * (kHalf + i));
    const __m512 a = values[i], b = values[i + kHalf];
    values[i] = _mm512_sub_ps(_mm512_mul_ps(a, cosine), _mm512_mul_ps(b, sine));
    values[i + kHalf] = _mm512_add_ps(_mm512_mul_ps(a, sine), _mm512_mul_ps(b, cosine));
  }
  store_all(values, y);
}

// The factor of a head's norm.
template <int kVectors>
inline float head_factor(const bf16_t* x, float eps) {
  __m512 lanes = _mm512_setzero_ps();
  for (int i = 0; i < kVectors; ++i) {
    const __m512 value = load_bf16(x + 16 * i);
    lanes = _mm512_add_ps(lanes, _mm512_mul_ps(value, value));
  }
  const float mean = _mm512_reduce_add_ps(lanes) / static_cast<float>(16 * kVectors);
  return 1.0f / __builtin_sqrtf(mean + eps);
}

// The heads of a token, from x on and to y; see RopeCall. All factors come first: a head's own steps wait for
// each other. The heads of the next token, which other threads computed, are prefetched. (Past the
// last one, nothing.)
template <int kVectors>
void turn_heads(const RopeCall& call, const bf16_t* x, const float* weights, const float* angles, bf16_t* y) {
  constexpr int kTogether = 16;
  float factors[kTogether] = {};
  const int64_t to_next = static_cast<int64_t>(call.length) * call.size;
  for (int first = 0; first < call.heads; first += kTogether) {
    const int count = call.heads - first < kTogether ? call.heads - first : kTogether;
    for (int h = 0; h < count; ++h) {
      const bf16_t* const head = x + (first + h) * call.strides[1];
      for (int i = 0; i < kVectors; i += 2) _mm_prefetch(head + call.strides[2] + 16 * i, _MM_HINT_T0);
      if (weights != nullptr) factors[h] = head_factor<kVectors>(head, call.eps);
    }
    for (int h = 0; h < count; ++h)
      turn_head<kVectors>(x + (first + h) * call.strides[1], weights, factors[h], angles,
                          y + (first + h) * to_next);
  }
}

// Which heads a call has turned in registers: those of usual sizes.
class HeadsInRegisters {
 public:
  explicit HeadsInRegisters(const RopeCall& call) : call_(call) {
    if (call.type != Float::bf16 || call.dims != call.size || call.interleaved || call.scale != 1.0f) return;
    if (call.size == 64) turn_ = turn_heads<4>;
    if (call.size == 96) turn_ = turn_heads<6>;
    if (call.size == 128) turn_ = turn_heads<8>;
    if (call.size == kMostInRegisters) turn_ = turn_heads<16>;
    if (turn_ != nullptr && call.weight != nullptr)
      load_floats(call.weight, call.weight_type, 0, call.size, weights_);
  }

  // The heads of a token, the first from element `from` of x on, to element `to` of y; false where they are
  // left to do.
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
  for_row_items(tokens, per_item, [&](int first, int last) {
    float* const values = static_cast<float*>(thread_scratch(sizeof(float) * call.size));
    const HeadsInRegisters in_registers(call);
    for (int token = first; token < last; ++token) {
      const int b = token / call.length, l = token % call.length;
      const float* const angles = call.angles + b * call.angle_stride + static_cast<int64_t>(l) * call.dims;
      const std::size_t from = b * call.strides[0] + l * call.strides[2];
      const std::size_t to = (static_cast<std::size_t>(b) * call.heads * call.length + l) * call.size;
      if (in_registers.turn(from, angles, to)) continue;
      for (int h = 0; h < call.heads; ++h) {
        load_head(call, from + h * call.strides[1], values);
        rotate(call, angles, values);
        store_floats(call.y, call.type, to + static_cast<std::size_t>(h) * call.length * call.size, call.size,
                     values);
      }
    }
  });
}

// libm's functions: exact range reduction matters at large positions, and this runs once per step.
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
