// Drawing tokens from logits, declared once per instruction set.
//
// The rules are those of engine/truncation.py: divide by the temperature, keep what is at least min_p
// times as likely as the likeliest, the k largest (and ties with the smallest of them), then the
// fewest likeliest that reach top_p of what is left (among equals the lower id first); draw where the
// running sum of the weights exp((logit - largest) / temperature), in order of id, passes the uniform
// number's share of the whole. Weights are float32 (2e-7 relative; 0 below exp(-86.9)), sums float64.
#pragma once

#include <cstdint>

#include "numeric.h"

namespace octavo {

// What a row is drawn from instead of its own logits: other ones for some tokens, and none (minus infinity)
// for those that may not come. A row that is not finite before that fails whatever is changed.
struct RowChanges {
  const int64_t* ids;   // [count], in [0, size); the first of a repeated id counts
  const float* values;  // [count]
  int count;
  const bool* allowed;  // [size], before `values` are put in; null: all

  bool any() const { return count > 0 || allowed != nullptr; }
};

struct RowDraw {
  const void* logits;  // [size]
  Float type;
  int size;           // at least 1
  float temperature;  // 0: take the largest, the lowest id among equals
  int top_k;          // 0: all
  double top_p;       // above 0; 1: all
  float min_p;        // 0: all
  double uniform;     // in [0, 1)
  RowChanges changes;
};

constexpr int kNotFinite = -1;  // the row holds a NaN, or its largest is infinite

#define OCTAVO_DECLARE_SAMPLING(isa)          \
  namespace isa {                             \
  int draw_from_halves(const RowDraw& call);  \
  int draw_from_floats(const RowDraw& call);  \
  }
OCTAVO_DECLARE_SAMPLING(generic)
OCTAVO_DECLARE_SAMPLING(avx2)
OCTAVO_DECLARE_SAMPLING(avx512)
#undef OCTAVO_DECLARE_SAMPLING

}  // namespace octavo
