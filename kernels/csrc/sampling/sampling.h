// Sampling of tokens from logits, declared for each instruction set.
//
// The rules are those of engine/executor/sampling/truncation.py. Logits are divided by the temperature. Three
// filters follow. min_p keeps tokens at least min_p times as likely as the most likely one. top_k keeps the k
// most likely and ties with the last. top_p keeps the fewest likeliest tokens that reach top_p of the
// remaining total, lower ids first. The sampled token is the one at which the running sum of weights
// exp((logit - largest) / temperature), in order of id, passes the uniform number's share of the total.
// Weights are float32 (relative error 2e-7; 0 below exp(-86.9)), sums are float64.
#pragma once

#include <cstdint>

#include "runtime/numeric.h"

namespace octavo {

struct TokenList {
  const int64_t* ids;  // [count], distinct, in [0, size) of the row
  int count;
};

// Changes of tokens' logits before sampling, in the order of application. Each is rounded to float32 (like
// engine/executor/sampling/logits_processors.py). A row that is not finite before the changes is an error.
struct RowChanges {
  TokenList biased;
  const float* bias;  // added
  TokenList seen;
  float repetition_penalty;  // divides positive logits and multiplies the others
  TokenList output;
  const float* output_counts;
  float frequency_penalty, presence_penalty;  // subtracted: the first once per occurrence, then the second
  TokenList suppressed;                       // set to minus infinity
  const bool* allowed;  // [size]: tokens that are false become minus infinity; null: all allowed

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
  float temperature;  // 0: choose the largest logit, of equals the lowest id
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

// Log-probability data of a row after penalties and biases, before temperature and truncation.
struct RowScores {
  int wanted;        // input: number of likeliest tokens
  Likely* top;       // [wanted]: most likely first, ties by lower id; tokens at minus infinity are left out
  int num_top;       // number of entries in top
  float logit;       // logit of the sampled or requested token
  double log_total;  // the natural logarithm of the sum of exp(logit) over the row
};

constexpr int kNotFinite = -1;  // the row has a NaN, or its largest logit is infinite

// Sampling functions. draw_token returns the sampled token and fills `scores` if it is not null. score_token
// fills `scores` for a given token without sampling; it returns false if the row is not finite.
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
