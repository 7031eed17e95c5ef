// MLX operations over packed weights. Every function only builds the graph; errors in shapes and
// types are std::invalid_argument (ValueError in Python) at that time.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "mlx/mlx.h"
#include "packed.h"

namespace octavo {

namespace mx = mlx::core;

using Packed = std::shared_ptr<const PackedWeight>;

// Evaluates its arguments and packs them. `bias` [outputs] is added to every result.
Packed pack_dense(const mx::array& weight, const std::optional<mx::array>& bias);
Packed pack_affine(const mx::array& codes, const mx::array& scales, const mx::array& biases, int group_size,
                   int bits, const std::optional<mx::array>& bias);

// The inverse: [weight], or [codes, scales, biases].
std::vector<mx::array> unpack(const Packed& weight);

mx::Dtype packed_dtype(const PackedWeight& weight);  // of a dense weight, or of the scales

// x [..., inputs] -> x W^T + bias + residual, [..., outputs] in the common type of x and the weight.
mx::array linear(const mx::array& x, const Packed& weight, const std::optional<mx::array>& residual,
                 bool exact, mx::StreamOrDevice stream);

// Rows of W: ids [...] -> [..., inputs]. An id outside [-outputs, outputs) fails the evaluation.
mx::array take_rows(const Packed& weight, const mx::array& ids, mx::StreamOrDevice stream);

}  // namespace octavo
