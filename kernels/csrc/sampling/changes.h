// Changes of a row's logits, and search for its most likely tokens.
#pragma once

#include "sampling/sampling.h"

namespace octavo {
namespace {

template <class Visit>
inline void for_each_list(const RowChanges& changes, Visit visit) {
  for (const TokenList& list : {changes.biased, changes.seen, changes.output, changes.suppressed})
    visit(list);
}

// Calls visit(id) for every changed token, possibly more than once.
template <class Visit>
inline void for_each_changed(const RowChanges& changes, Visit visit) {
  for_each_list(changes, [&](const TokenList& list) {
    for (int i = 0; i < list.count; ++i) visit(list.ids[i]);
  });
}

// Makes all changes except `allowed`; reads and writes only logits of changed tokens.
inline void make_changes(const RowChanges& changes, float* logits) {
  for (int i = 0; i < changes.biased.count; ++i) logits[changes.biased.ids[i]] += changes.bias[i];
  for (int i = 0; i < changes.seen.count; ++i) {
    float& logit = logits[changes.seen.ids[i]];
    const float less = logit / changes.repetition_penalty, more = logit * changes.repetition_penalty;
    logit = logit > 0 ? less : more;  // no branch, because signs are unpredictable
  }
  for (int i = 0; i < changes.output.count; ++i) {
    float& logit = logits[changes.output.ids[i]];
    logit -= changes.frequency_penalty * changes.output_counts[i];
    logit -= changes.presence_penalty;
  }
  for (int i = 0; i < changes.suppressed.count; ++i) logits[changes.suppressed.ids[i]] = -__builtin_inff();
}

constexpr int kWalkBlock = 512;  // weights whose sum is computed before it is compared with the target
constexpr int kTopBlock = 64;    // tokens that are skipped together if none is likely enough

// Keeps the largest of the logits that it is given, in order of id.
struct Top {
  RowScores& scores;

  explicit Top(RowScores& to) : scores(to) { scores.num_top = 0; }

  // Returns the value that a logit must exceed to be kept.
  float bound() const {
    return scores.num_top < scores.wanted ? -__builtin_inff() : scores.top[scores.num_top - 1].logit;
  }

  void offer(int id, float logit) {
    if (scores.wanted == 0 || !(logit > bound())) return;
    int at = scores.num_top < scores.wanted ? scores.num_top++ : scores.num_top - 1;
    for (; at > 0 && scores.top[at - 1].logit < logit; --at) scores.top[at] = scores.top[at - 1];
    scores.top[at] = {id, logit};
  }
};

}  // namespace
}  // namespace octavo
