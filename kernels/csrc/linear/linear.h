// MLX operations over packed weights. Every function only builds the graph, and throws std::invalid_argument
// (ValueError in Python) for wrong shapes and types.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "linear/packed.h"
#include "mlx/mlx.h"
#include "ops/ops.h"

namespace octavo {

namespace mx = mlx::core;

using Packed = std::shared_ptr<const PackedWeight>;

// Evaluates its arguments and packs them as one weight: outputs of the first matrix, then those of the next.
// `bias` [outputs] is added to every result.
Packed pack_dense(const std::vector<mx::array>& weights, const std::optional<mx::array>& bias);
Packed pack_affine(const std::vector<mx::array>& codes, const std::vector<mx::array>& scales,
                   const std::vector<mx::array>& biases, int group_size, int bits,
                   const std::optional<mx::array>& bias);

// Packs weights of MLX's modes "mxfp4" (groups of 32, scales E8M0) and "nvfp4" (groups of 16, scales E4M3).
Packed pack_fp4(const std::vector<mx::array>& codes, const std::vector<mx::array>& scales,
                const std::string& mode, const std::optional<mx::array>& bias);

// Returns the arrays that were packed: [weight], [codes, scales, biases] or [codes, scales].
std::vector<mx::array> unpack(const Packed& weight);

// Returns the type of a dense weight, or of affine scales; bfloat16 for fp4, as MLX dequantizes it.
mx::Dtype packed_dtype(const PackedWeight& weight);

// Returns the type of x W^T: the common type of x and the weight, or x's type if the weight has no float
// type.
mx::Dtype result_dtype(const mx::array& x, const PackedWeight& weight);

// Returns x W^T + bias + residual, [..., outputs] of type result_dtype, for x [..., inputs].
mx::array linear(const mx::array& x, const Packed& weight, const std::optional<mx::array>& residual,
                 bool exact, mx::StreamOrDevice stream);

// Returns activation(gate) * up [..., outputs / 2] for `both` [..., outputs], which has gates before ups.
// Returns nullopt unless `both` is an unevaluated result of `linear` without a residual, and its halves are
// whole panels. Results are bit-identical to evaluating `both` first.
std::optional<mx::array> linear_gated(const mx::array& both, Activation activation,
                                      mx::StreamOrDevice stream);

// Returns the greedy choice of each row of x [..., inputs]: [ids, logits], int32 and float32 [...]. ids is
// the arg-max of `linear` without a residual (the lowest of equals). logits is its value, or NaN if any
// result is NaN. Other results are not stored.
std::vector<mx::array> linear_argmax(const mx::array& x, const Packed& weight, bool exact,
                                     mx::StreamOrDevice stream);

// Returns rows of W, [..., inputs], for ids [...]. An id outside [-outputs, outputs) fails the evaluation.
mx::array take_rows(const Packed& weight, const mx::array& ids, mx::StreamOrDevice stream);

}  // namespace octavo
