// Mixtures of experts: one packed weight per expert; each row is multiplied by its expert's weight.
#pragma once

#include <vector>

#include "linear/linear.h"

namespace octavo {

struct PackedExperts {
  // Throws std::invalid_argument unless there is at least one expert, and all have equal shapes and formats.
  explicit PackedExperts(std::vector<Packed> experts);

  const PackedShape& shape() const { return weights.front()->shape; }  // shape of every expert
  std::size_t nbytes() const;
  std::size_t unread_nbytes() const;  // bytes of the weights that no product has read

  std::vector<Packed> weights;
};

using Experts = std::shared_ptr<const PackedExperts>;

// Returns y [..., M, outputs]: block i of x [..., M, inputs] times expert ids[i], bit-identical to `linear`.
// The leading dimensions of x and ids [...] are broadcast. An id outside [0, experts) fails the evaluation.
mx::array gather_linear(const mx::array& x, const Experts& experts, const mx::array& ids, bool exact,
                        mx::StreamOrDevice stream);

}  // namespace octavo
