// Drawing tokens from logits, declared once per instruction set.
//
// The rules are those of engine/executor/sampling/truncation.py: divide by the temperature, keep what is at
// least min_p times as likely as the likeliest, the k largest (and ties with the smallest of them), then the
// fewest likeliest that reach top_p of what is left (among equals the lower id first); draw where the
// running sum of the weights exp((logit - largest) / temperature), in order of id, passes the uniform
// number's share of the whole. Weights are float32 (2e-7 relative; 0 below exp(-86.9)), sums float64.
#pragma once

#include <cstdint>

#include "runtime/numeric.h"

namespace octavo {

struct TokenList {
  const int64_t* ids;  // [count], distinct, in [0, size) of the row
  int count;
};

// What the logits of some tokens become before anything is drawn, one after the other, each rounded to
// float32 (as engine/executor/sampling/logits_processors.py has it). A row that is not finite before that
// fails whatever is changed.
struct RowChanges {
  TokenList biased;
  const float* bias;  // is added
  TokenList seen;
  float repetition_penalty;  // divides what is above 0 and multiplies the rest
  TokenList output;
  const float* output_counts;
  float frequency_penalty, presence_penalty;  // the first times the count, then the second, are subtracted
  TokenList suppressed;                       // minus infinity
  const bool* allowed;                        // [size]: minus infinity for all others; null: all are

  bool any() const {
    return biased.count + seen.count + output.count + suppressed.count > 0 || allowed != nullptr;
  }
};

struct Row {
  const void* logits;  // [size]
  Float type;
  int size;  // at least 1
};

struct RowDraw : Row {
  float temperature;  // 0: take the largest, the lowest id among equals
  int top_k;          // 0: all
  double top_p;       // above 0; 1: all
  float min_p;        // 0: all
  double uniform;     // in [0, 1)
  RowChanges changes;
};

struct Likely {
  int id;
  float logit;
};

// How likely tokens of a row are, changes made, before temperature and truncation.
struct RowScores {
  int wanted;        // given: of the likeliest tokens
  Likely* top;       // [wanted]: the likeliest first, of equals the lowest id; none at minus infinity
  int num_top;       // how many those are
  float logit;       // of the token that is drawn or asked for
  double log_total;  // the natural logarithm of the sum of exp(logit) over the row
};

constexpr int kNotFinite = -1;  // the row holds a NaN, or its largest is infinite

// draw_token: the token, and where `scores` is not null what they ask for. score_token: the same of a given
// token, without a draw; false if the row is not finite.
#define OCTAVO_DECLARE_SAMPLING(isa)                              \
  namespace isa {                                                 \
  int draw_token(const RowDraw& call, RowScores* scores);         \
  bool score_token(const Row& row, int token, RowScores& scores); \
  }
OCTAVO_DECLARE_SAMPLING(generic)
OCTAVO_DECLARE_SAMPLING(avx2)
OCTAVO_DECLARE_SAMPLING(avx512)
#undef OCTAVO_DECLARE_SAMPLING

}  // namespace octavo
