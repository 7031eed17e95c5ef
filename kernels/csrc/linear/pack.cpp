// Conversion between MLX's arrays and packed weights.
#include <algorithm>

#include "linear/linear.h"
#include "linear/mapped_file.h"
#include "program/primitive.h"

namespace octavo {
namespace {

void set_bias(PackedWeight& weight, const std::optional<mx::array>& bias) {
  if (!bias) return;
  const int outputs = weight.shape.outputs;
  require(bias->ndim() == 1 && bias->shape(0) == outputs, "bias must have shape [" + std::to_string(outputs) +
                                                              "] like the weight's rows, got " +
                                                              shape_text(*bias));
  const mx::array values = evaluated(mx::astype(*bias, mx::float32));
  weight.bias.assign(static_cast<std::size_t>(weight.shape.num_panels()) * kPanel, 0.0f);
  std::copy_n(values.data<float>(), outputs, weight.bias.begin());
}

WeightKind dense_kind(mx::Dtype type) {
  return type == mx::bfloat16 ? WeightKind::bf16 : type == mx::float16 ? WeightKind::f16 : WeightKind::f32;
}

// Checks codes [outputs, words] that are packed as one weight, and returns their number of inputs.
int check_codes(const std::vector<mx::array>& codes, int group, int bits) {
  require(!codes.empty(), "there must be at least one weight, got none");
  for (const mx::array& each : codes) {
    require(each.ndim() == 2 && each.size() > 0 && each.dtype() == mx::uint32,
            "codes must be uint32 [outputs, words], got " + array_text(each));
    require(int64_t{32} * each.shape(1) % (bits * group) == 0,
            "codes " + shape_text(each) + " are not whole groups of " + std::to_string(group) + " codes of " +
                std::to_string(bits) + " bits per row");
    require(each.shape(1) == codes[0].shape(1),
            "codes that are packed as one must have the same inputs, got " + shape_text(codes[0]) + " and " +
                shape_text(each));
  }
  return static_cast<int>(int64_t{32} * codes[0].shape(1) / bits);
}

void check_scales(const char* name, const std::vector<mx::array>& scales, const std::vector<mx::array>& codes,
                  int inputs, int group) {
  require(scales.size() == codes.size(), std::string(name) + " must be as many arrays as codes, " +
                                             std::to_string(codes.size()) + ", got " +
                                             std::to_string(scales.size()));
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const mx::Shape wanted{codes[i].shape(0), inputs / group};
    require(scales[i].shape() == wanted,
            std::string(name) + " must have shape [outputs, inputs / group_size] = [" +
                std::to_string(wanted[0]) + ", " + std::to_string(wanted[1]) + "] for codes " +
                shape_text(codes[i]) + ", got " + shape_text(scales[i]));
  }
}

// Evaluates matrices and returns their rows. `plain` owns the data until all are packed.
std::vector<MatrixRows> rows_of(const std::vector<mx::array>& arrays, std::vector<mx::array>& plain) {
  std::vector<MatrixRows> rows;
  for (const mx::array& array : arrays) {
    plain.push_back(evaluated(array));
    rows.push_back({plain.back().data<void>(), array.shape(0)});
  }
  return rows;
}

// Packs matrices as one weight; `shape.outputs` is not yet known, and `biases` may be empty.
Packed pack_quantized(PackedShape shape, const std::vector<mx::array>& codes,
                      const std::vector<mx::array>& scales, const std::vector<mx::array>& biases,
                      const std::optional<mx::array>& bias) {
  for (const mx::array& each : codes) shape.outputs += each.shape(0);
  std::vector<mx::array> plain;
  const QuantizedRows parts{rows_of(codes, plain), rows_of(scales, plain), rows_of(biases, plain)};
  auto packed = std::make_shared<PackedWeight>(shape, parts);
  set_bias(*packed, bias);
  return packed;
}

}  // namespace

Packed pack_dense(const std::vector<mx::array>& weights, const std::optional<mx::array>& bias) {
  require(!weights.empty(), "there must be at least one weight, got none");
  int outputs = 0;
  for (const mx::array& weight : weights) {
    require_floats("weight", weight, weight.ndim() == 2 && weight.size() > 0,
                   "[outputs, inputs], neither of them 0");
    require(weight.shape(1) == weights[0].shape(1) && weight.dtype() == weights[0].dtype(),
            "weights that are packed as one must have the same inputs and type, got " +
                array_text(weights[0]) + " and " + array_text(weight));
    outputs += weight.shape(0);
  }
  const mx::Dtype type = weights[0].dtype();
  const PackedShape shape{dense_kind(type), float_of(type), outputs, weights[0].shape(1)};
  std::vector<mx::array> plain;
  auto packed = std::make_shared<PackedWeight>(shape, rows_of(weights, plain));
  set_bias(*packed, bias);
  return packed;
}

Packed pack_affine(const std::vector<mx::array>& codes, const std::vector<mx::array>& scales,
                   const std::vector<mx::array>& biases, int group_size, int bits,
                   const std::optional<mx::array>& bias) {
  require((bits >= 1 && bits <= 6) || bits == 8, "bits must be 1 to 6 or 8, got " + std::to_string(bits));
  require(group_size == 32 || group_size == 64 || group_size == 128,
          "group_size must be 32, 64 or 128, got " + std::to_string(group_size));
  const int inputs = check_codes(codes, group_size, bits);
  check_scales("scales", scales, codes, inputs, group_size);
  check_scales("biases", biases, codes, inputs, group_size);
  const mx::Dtype type = scales[0].dtype();
  for (std::size_t i = 0; i < codes.size(); ++i) {
    require(
        is_float(scales[i].dtype()) && scales[i].dtype() == biases[i].dtype() && scales[i].dtype() == type,
        "scales and biases must share a type out of bfloat16, float16 and float32, got " +
            dtype_text(scales[i].dtype()) + " and " + dtype_text(biases[i].dtype()));
  }
  return pack_quantized({WeightKind::affine, float_of(type), 0, inputs, group_size, bits}, codes, scales,
                        biases, bias);
}

Packed pack_fp4(const std::vector<mx::array>& codes, const std::vector<mx::array>& scales,
                const std::string& mode, const std::optional<mx::array>& bias) {
  require(mode == "mxfp4" || mode == "nvfp4", "mode must be mxfp4 or nvfp4, got " + mode);
  const WeightKind kind = mode == "mxfp4" ? WeightKind::mxfp4 : WeightKind::nvfp4;
  const int group = kind == WeightKind::mxfp4 ? 32 : 16;
  const int inputs = check_codes(codes, group, 4);
  check_scales("scales", scales, codes, inputs, group);
  for (const mx::array& each : scales) {
    require(each.dtype() == mx::uint8,
            "scales of " + mode + " must be uint8, got " + dtype_text(each.dtype()));
  }
  return pack_quantized({kind, Float::bf16, 0, inputs, group, 4}, codes, scales, {}, bias);
}

std::vector<mx::array> unpack(const Packed& weight) {
  const PackedShape& shape = weight->shape;
  const auto empty = [](mx::Shape dims, mx::Dtype type) {
    mx::array a(std::move(dims), type, nullptr, {});
    allocate(a);
    a.set_status(mx::array::Status::available);
    return a;
  };
  const mx::Dtype type = packed_dtype(*weight);
  if (!shape.quantized()) {
    mx::array dense = empty({shape.outputs, shape.inputs}, type);
    weight->unpack_dense(dense.data<void>());
    return {dense};
  }
  mx::array codes = empty({shape.outputs, shape.inputs * shape.bits / 32}, mx::uint32);
  const mx::Shape groups{shape.outputs, shape.num_groups()};
  mx::array scales = empty(groups, shape.affine() ? type : mx::uint8);
  if (!shape.affine()) {
    weight->unpack_quantized(codes.data<uint32_t>(), scales.data<void>(), nullptr);
    return {codes, scales};
  }
  mx::array biases = empty(groups, type);
  weight->unpack_quantized(codes.data<uint32_t>(), scales.data<void>(), biases.data<void>());
  return {codes, scales, biases};
}

}  // namespace octavo
