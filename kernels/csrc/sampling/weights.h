// The weights of a row of float32 logits, computed when they are asked for: they are asked for twice at most,
// and to keep them would push the logits out of the cache. Compiled once per instruction set.
#pragma once

#include "runtime/exp_float.h"
#include "sampling/maxima.h"
#include "sampling/vectors.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Sums side by side, of one vector after the other.
struct WideSum {
  Doubles parts[4] = {};

  double total() const {
    const Doubles all = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    double sum = 0;
    for (int lane = 0; lane < kWidth; ++lane) sum += all[lane];
    return sum;
  }
};

// The sum of those of `count` weights that are at least `bound`. What follows up to a whole vector must be 0.
double sum_from(const float* weights, int count, float bound) {
  WideSum sum;
  int i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth)
    for (int j = 0; j < 4; ++j) sum.parts[j] += widen(only_from(load_half(weights + i + j * kWidth), bound));
  for (; i < count; i += kWidth) sum.parts[0] += widen(only_from(load_half(weights + i), bound));
  return sum.total();
}

// Vectors whose exponentials are computed side by side: one alone is a chain of operations that wait for each
// other. Eight were the fastest of one, two, four and eight on a Zen 4.
constexpr int kChains = 8;
struct Several {
  Vec parts[kChains];
};

// Inlined without fail, as is all of their arithmetic: what is called passes them through memory.
#define OCTAVO_INLINED __attribute__((always_inline))

template <class Make>
inline OCTAVO_INLINED Several several(Make make) {
  Several made;
  for (int i = 0; i < kChains; ++i) made.parts[i] = make(i);
  return made;
}

inline OCTAVO_INLINED Several operator+(const Several& a, const Several& b) {
  return several([&](int i) OCTAVO_INLINED { return a.parts[i] + b.parts[i]; });
}
inline OCTAVO_INLINED Several operator-(const Several& a, const Several& b) {
  return several([&](int i) OCTAVO_INLINED { return a.parts[i] - b.parts[i]; });
}
inline OCTAVO_INLINED Several operator*(const Several& a, const Several& b) {
  return several([&](int i) OCTAVO_INLINED { return a.parts[i] * b.parts[i]; });
}
inline OCTAVO_INLINED Several operator+(const Several& a, float b) {
  return several([&](int i) OCTAVO_INLINED { return a.parts[i] + b; });
}
inline OCTAVO_INLINED Several operator-(const Several& a, float b) {
  return several([&](int i) OCTAVO_INLINED { return a.parts[i] - b; });
}
inline OCTAVO_INLINED Several operator*(const Several& a, float b) {
  return several([&](int i) OCTAVO_INLINED { return a.parts[i] * b; });
}

template <class Bits>
inline OCTAVO_INLINED Several power_of_two(const Several& shifted) {
  return several([&](int i) OCTAVO_INLINED { return octavo::power_of_two<Bits>(shifted.parts[i]); });
}

constexpr float kLeastWeight = 0x1.8p-126f;  // see above_zero

// Logits that min_p or a `smallest` logit leaves out weigh 0.
struct Weights {
  const Scanned& row;
  float largest, temperature, smallest, min_p;

  Weights(const Scanned& of, float most, const RowDraw& call, float least)
      : row(of),
        largest(most),
        temperature(call.temperature),
        smallest(least),
        min_p(std::max(call.min_p, kLeastWeight)) {}

  int blocks() const { return (row.size + kWalkBlock - 1) / kWalkBlock; }

  // Weights of `count` logits, a multiple of kLanes.
  void weigh(const float* logits, int count, float* to) const {
    constexpr int kTogether = kChains * kLanes;
    with_rules([&](auto scale, auto is_large) {
      int i = 0;
      for (; i + kTogether <= count; i += kTogether) weigh_several(logits + i, to + i, scale, is_large);
      if (i == count) return;
      alignas(kAligned) float last[kTogether] = {};
      std::copy_n(logits + i, count - i, last);
      weigh_several(last, last, scale, is_large);
      std::copy_n(last, count - i, to + i);
    });
  }

  float largest_of(int block) const {
    constexpr int kMaxima = kWalkBlock / kTopBlock;
    const float* const maxima = row.maxima + block * kMaxima;
    return *std::max_element(maxima, maxima + kMaxima);
  }

  // Weights of a block, 0 beyond the row; false if all of them are certainly 0: nothing is written then.
  bool of_block(int block, float* to) const {
    const float most = largest_of(block);
    if (most < smallest || weight_bound(most) < min_p) return false;
    const int begin = block * kWalkBlock, count = row.size - begin;
    const float* logits = row.logits + begin;
    float last[kWalkBlock];
    if (count < kWalkBlock) {
      std::fill(std::copy_n(logits, count, last), last + kWalkBlock, -__builtin_inff());
      logits = last;
    }
    weigh(logits, kWalkBlock, to);
    return true;
  }

  // The sum of a block's weights.
  double sum_of(int block) const {
    alignas(kAligned) float weights[kWalkBlock];
    if (!of_block(block, weights)) return 0;
    WideSum sum;
    for (int i = 0; i < kWalkBlock; i += 4 * kWidth)
      for (int j = 0; j < 4; ++j) sum.parts[j] += widen(load_half(weights + i + j * kWidth));
    return sum.total();
  }

 private:
  // use(scale, is_large) with what divides by the temperature and says which logits are left.
  template <class Use>
  void with_rules(Use use) const {
    const auto as_it_is = [](Vec x) { return x; };
    const auto scaled = [divisor = Vec{} + temperature](Vec x) { return x / divisor; };
    const auto all = [](Vec) { return IntVec{} - 1; };
    const auto large = [least = Vec{} + smallest](Vec x) { return x >= least; };
    if (smallest > -__builtin_inff()) temperature == 1 ? use(as_it_is, large) : use(scaled, large);
    else temperature == 1 ? use(as_it_is, all) : use(scaled, all);
  }

  // What no weight of smaller logits exceeds: the exponential is not monotonic to the last bit.
  float weight_bound(float logit) const { return 1.001f * exp_float((logit - largest) / temperature); }

  template <class Scale, class IsLarge>
  OCTAVO_INLINED void weigh_several(const float* logits, float* to, Scale scale, IsLarge is_large) const {
    const Vec most = Vec{} + largest, lowest = Vec{} - 87.0f, bound = Vec{} + min_p;
    const auto exponent = [&](int i) OCTAVO_INLINED {  // none is above 0
      return at_least(lowest, scale(load(logits + i * kLanes) - most));
    };
    const Several powers = exp_within<Several, IntVec>(several(exponent));
    for (int i = 0; i < kChains; ++i) {
      const Vec power = powers.parts[i], logit = load(logits + i * kLanes);
      store(to + i * kLanes, (Vec)((IntVec)power & is_large(logit) & (power >= bound)));
    }
  }
};

#undef OCTAVO_INLINED

}  // namespace
}  // namespace octavo::OCTAVO_ISA
