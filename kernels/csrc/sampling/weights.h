// The weights of a row of float32 logits, computed on demand. Weights are not stored, because they are used
// at most twice and would evict the logits from the cache. Compiled for each instruction set.
#pragma once

#include "runtime/exp_float.h"
#include "sampling/maxima.h"
#include "sampling/vectors.h"

namespace octavo::OCTAVO_ISA {
namespace {

// A sum in several parallel parts, which do not wait for each other.
struct WideSum {
  Doubles parts[4] = {};

  double total() const {
    const Doubles all = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    double sum = 0;
    for (int lane = 0; lane < kWidth; ++lane) sum += all[lane];
    return sum;
  }
};

// Returns the sum of the weights [0, count) that are at least `bound`. The last vector must be zero-padded.
double sum_from(const float* weights, int count, float bound) {
  WideSum sum;
  int i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth)
    for (int j = 0; j < 4; ++j) sum.parts[j] += widen(only_from(load_half(weights + i + j * kWidth), bound));
  for (; i < count; i += kWidth) sum.parts[0] += widen(only_from(load_half(weights + i), bound));
  return sum.total();
}

// Returns the sum of a block of weights.
double sum_block(const float* weights) {
  WideSum sum;
  for (int i = 0; i < kWalkBlock; i += 4 * kWidth)
    for (int j = 0; j < 4; ++j) sum.parts[j] += widen(load_half(weights + i + j * kWidth));
  return sum.total();
}

constexpr float kLeastWeight = 0x1.8p-126f;  // smaller weights count as 0
// smallest exponent that gives a weight of at least kLeastWeight
constexpr float kLeastExponent = -0x1.5bb96cp+6f;

// The weights of a row. Logits that min_p or `smallest` excludes have weight 0.
struct Weights {
  const Scanned& row;
  float largest, temperature, smallest, min_p;

  Weights(const Scanned& of, float most, const RowDraw& call, float least)
      : row(of),
        largest(most),
        temperature(call.temperature),
        smallest(std::max(least, lowest_above_zero())),
        min_p(call.min_p) {}

  int blocks() const { return (row.size + kWalkBlock - 1) / kWalkBlock; }

  float largest_of(int block) const {
    constexpr int kMaxima = kWalkBlock / kTopBlock;
    const float* const maxima = row.maxima + block * kMaxima;
    float most = maxima[0];
    for (int i = 1; i < kMaxima; ++i) most = larger_of(maxima[i], most);  // (std::max_element has branches)
    return most;
  }

  // Writes a block's weights, 0 beyond the row; or returns false, without writing, if all of them must be 0.
  bool of_block(int block, float* to) const {
    const float most = largest_of(block);
    if (most < smallest || (min_p > kLeastWeight && weight_bound(most) < min_p)) return false;
    const int begin = block * kWalkBlock, count = row.size - begin;
    const float* logits = row.logits + begin;
    float last[kWalkBlock];
    if (count < kWalkBlock) {
      std::fill(std::copy_n(logits, count, last), last + kWalkBlock, -__builtin_inff());
      logits = last;
    }
    with_rules([&](auto scale, auto only) { weigh(logits, to, scale, only); });
    return true;
  }

  // Returns the sum of a block's weights.
  double sum_of(int block) const {
    alignas(kAligned) float weights[kWalkBlock];
    return of_block(block, weights) ? sum_block(weights) : 0;
  }

 private:
  float exponent_of(float logit) const { return (logit - largest) / temperature; }

  // Returns the lowest logit with a weight other than 0, by bisection between minus infinity and the largest.
  float lowest_above_zero() const {
    const auto flip = [](int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); };  // its own inverse
    int64_t below = flip(static_cast<int32_t>(as_bits(-__builtin_inff())));
    int64_t from = flip(static_cast<int32_t>(as_bits(largest)));
    while (from - below > 1) {
      const int64_t middle = below + (from - below) / 2;
      const float logit = as_float(static_cast<uint32_t>(flip(static_cast<int32_t>(middle))));
      (exponent_of(logit) >= kLeastExponent ? from : below) = middle;
    }
    return as_float(static_cast<uint32_t>(flip(static_cast<int32_t>(from))));
  }

  // Calls use(scale, only): `scale` divides by the temperature, `only` sets excluded weights to 0.
  template <class Use>
  void with_rules(Use use) const {
    const auto as_it_is = [](Vec x) { return x; };
    const auto scaled = [divisor = Vec{} + temperature](Vec x) { return x / divisor; };
    const auto large = [least = Vec{} + smallest](Vec weight, Vec logit) {
      return (Vec)((IntVec)weight & (logit >= least));
    };
    const auto likely = [large, bound = Vec{} + min_p](Vec weight, Vec logit) {
      const Vec kept = large(weight, logit);
      return (Vec)((IntVec)kept & (kept >= bound));
    };
    if (min_p > kLeastWeight) temperature == 1 ? use(as_it_is, likely) : use(scaled, likely);
    else temperature == 1 ? use(as_it_is, large) : use(scaled, large);
  }

  // Returns an upper bound of the weights of logits up to `logit`. 1.001: exp_float is not exactly monotonic.
  float weight_bound(float logit) const { return 1.001f * exp_float(exponent_of(logit)); }

  // Computes the weights of kWalkBlock logits. Logits below `smallest` have arbitrary weights until `only`
  // excludes them.
  template <class Scale, class Only>
  void weigh(const float* logits, float* to, Scale scale, Only only) const {
    const Vec most = Vec{} + largest;
    for (int i = 0; i < kWalkBlock; i += kLanes) {
      const Vec logit = load(logits + i);
      store(to + i, only(exp_within<Vec, UintVec>(scale(logit - most)), logit));
    }
  }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
