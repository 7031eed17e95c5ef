// Mixtures of experts: one packed weight per expert, and the operation that gives each row its own.
#pragma once

#include <vector>

#include "linear/linear.h"

namespace octavo {

struct PackedExperts {
  // std::invalid_argument unless there is one at least, and all have the same shape and format.
  explicit PackedExperts(std::vector<Packed> experts);

  const PackedShape& shape() const { return weights.front()->shape; }  // of every expert
  std::size_t nbytes() const;
  std::size_t unread_nbytes() const;  // bytes that no product reads

  std::vector<Packed> weights;
};

using Experts = std::shared_ptr<const PackedExperts>;

// x [..., M, inputs] and ids [...], whose leading dimensions broadcast to one shape:
// y [..., M, outputs], block i by expert ids[i], bit by bit what `linear` makes of it.
// An id outside [0, experts) fails the evaluation.
mx::array gather_linear(const mx::array& x, const Experts& experts, const mx::array& ids, bool exact,
                        mx::StreamOrDevice stream);

}  // namespace octavo
