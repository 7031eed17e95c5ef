// MLX operations over packed weights. Every function only builds the graph; errors in shapes and
// types are std::invalid_argument (ValueError in Python) at that time.
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

// Evaluates its arguments and packs them, several as one: the outputs of the first, then those of the next,
// and so on. `bias` [outputs] is added to every result.
Packed pack_dense(const std::vector<mx::array>& weights, const std::optional<mx::array>& bias);
Packed pack_affine(const std::vector<mx::array>& codes, const std::vector<mx::array>& scales,
                   const std::vector<mx::array>& biases, int group_size, int bits,
                   const std::optional<mx::array>& bias);

// The same for MLX's modes "mxfp4" (groups of 32, scales E8M0) and "nvfp4" (groups of 16, scales E4M3).
Packed pack_fp4(const std::vector<mx::array>& codes, const std::vector<mx::array>& scales,
                const std::string& mode, const std::optional<mx::array>& bias);

// The inverse: [weight], [codes, scales, biases] or [codes, scales].
std::vector<mx::array> unpack(const Packed& weight);

// Returns the type of a dense weight, or of affine scales; bfloat16 for fp4, as MLX dequantizes it.
mx::Dtype packed_dtype(const PackedWeight& weight);

// Returns the type of x W^T: the common type of x and the weight, or of x if the weight has no float type.
mx::Dtype result_dtype(const mx::array& x, const PackedWeight& weight);

// x [..., inputs] -> x W^T + bias + residual, [..., outputs] of result_dtype.
mx::array linear(const mx::array& x, const Packed& weight, const std::optional<mx::array>& residual,
                 bool exact, mx::StreamOrDevice stream);

// Returns activation(gate) * up [..., outputs / 2], if `both` [..., outputs] is an unevaluated result of
// `linear` without a residual: the gate, then its partner. The bits are those of evaluating `both` first.
// None if `both` is something else, or its halves are not whole panels.
std::optional<mx::array> linear_gated(const mx::array& both, Activation activation,
                                      mx::StreamOrDevice stream);

// The greedy choice of each row of x [..., inputs]: [ids, logits], int32 and float32 [...], where ids is
// the arg-max of `linear` without a residual (the lowest of equals) and logits its value: NaN where any is.
// The results themselves are never stored.
std::vector<mx::array> linear_argmax(const mx::array& x, const Packed& weight, bool exact,
                                     mx::StreamOrDevice stream);

// Rows of W: ids [...] -> [..., inputs]. An id outside [-outputs, outputs) fails the evaluation.
mx::array take_rows(const Packed& weight, const mx::array& ids, mx::StreamOrDevice stream);

}  // namespace octavo
