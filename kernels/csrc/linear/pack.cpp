// Packed weights from MLX's arrays, and back.
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

// The number of inputs of codes [outputs, words].
int check_codes(const mx::array& codes, int group, int bits) {
  require(
      codes.ndim() == 2 && codes.size() > 0 && codes.dtype() == mx::uint32,
      "codes must be uint32 [outputs, words], got " + dtype_text(codes.dtype()) + " " + shape_text(codes));
  const int64_t stream = int64_t{32} * codes.shape(1);
  require(stream % (bits * group) == 0, "codes " + shape_text(codes) + " are not whole groups of " +
                                            std::to_string(group) + " codes of " + std::to_string(bits) +
                                            " bits per row");
  return static_cast<int>(stream / bits);
}

void check_scales(const char* name, const mx::array& scales, const mx::array& codes, int inputs, int group) {
  const mx::Shape wanted{codes.shape(0), inputs / group};
  require(scales.shape() == wanted, std::string(name) +
                                        " must have shape [outputs, inputs / group_size] = [" +
                                        std::to_string(wanted[0]) + ", " + std::to_string(wanted[1]) +
                                        "] for codes " + shape_text(codes) + ", got " + shape_text(scales));
}

Packed pack_quantized(const PackedShape& shape, const mx::array& codes, const mx::array& scales,
                      const mx::array* biases, const std::optional<mx::array>& bias) {
  const mx::array q = evaluated(codes), s = evaluated(scales), b = biases != nullptr ? evaluated(*biases) : s;
  auto packed = std::make_shared<PackedWeight>(shape, q.data<uint32_t>(), s.data<void>(), b.data<void>());
  set_bias(*packed, bias);
  return packed;
}

}  // namespace

Packed pack_dense(const mx::array& weight, const std::optional<mx::array>& bias) {
  return pack_stacked({weight}, bias);
}

Packed pack_stacked(const std::vector<mx::array>& weights, const std::optional<mx::array>& bias) {
  require(!weights.empty(), "there must be at least one weight, got none");
  std::vector<mx::array> plain;
  std::vector<DenseRows> parts;
  int outputs = 0;
  for (const mx::array& weight : weights) {
    require(weight.ndim() == 2 && weight.size() > 0,
            "weight must have shape [outputs, inputs], neither of them 0, got " + shape_text(weight));
    require(is_float(weight.dtype()),
            "weight must be bfloat16, float16 or float32, got " + dtype_text(weight.dtype()));
    require(weight.shape(1) == weights[0].shape(1) && weight.dtype() == weights[0].dtype(),
            "weights that are packed as one must have the same inputs and type, got " +
                dtype_text(weights[0].dtype()) + " " + shape_text(weights[0]) + " and " +
                dtype_text(weight.dtype()) + " " + shape_text(weight));
    plain.push_back(evaluated(weight));
    parts.push_back({plain.back().data<void>(), weight.shape(0)});
    outputs += weight.shape(0);
  }
  const mx::Dtype type = plain[0].dtype();
  const PackedShape shape{dense_kind(type), float_of(type), outputs, plain[0].shape(1)};
  auto packed = std::make_shared<PackedWeight>(shape, parts);
  set_bias(*packed, bias);
  return packed;
}

Packed pack_affine(const mx::array& codes, const mx::array& scales, const mx::array& biases, int group_size,
                   int bits, const std::optional<mx::array>& bias) {
  require((bits >= 1 && bits <= 6) || bits == 8, "bits must be 1 to 6 or 8, got " + std::to_string(bits));
  require(group_size == 32 || group_size == 64 || group_size == 128,
          "group_size must be 32, 64 or 128, got " + std::to_string(group_size));
  const int inputs = check_codes(codes, group_size, bits);
  check_scales("scales", scales, codes, inputs, group_size);
  check_scales("biases", biases, codes, inputs, group_size);
  require(is_float(scales.dtype()) && scales.dtype() == biases.dtype(),
          "scales and biases must share a type out of bfloat16, float16 and float32, got " +
              dtype_text(scales.dtype()) + " and " + dtype_text(biases.dtype()));
  const PackedShape shape{
      WeightKind::affine, float_of(scales.dtype()), codes.shape(0), inputs, group_size, bits};
  return pack_quantized(shape, codes, scales, &biases, bias);
}

Packed pack_fp4(const mx::array& codes, const mx::array& scales, const std::string& mode,
                const std::optional<mx::array>& bias) {
  require(mode == "mxfp4" || mode == "nvfp4", "mode must be mxfp4 or nvfp4, got " + mode);
  const WeightKind kind = mode == "mxfp4" ? WeightKind::mxfp4 : WeightKind::nvfp4;
  const int group = kind == WeightKind::mxfp4 ? 32 : 16;
  const int inputs = check_codes(codes, group, 4);
  check_scales("scales", scales, codes, inputs, group);
  require(scales.dtype() == mx::uint8,
          "scales of " + mode + " must be uint8, got " + dtype_text(scales.dtype()));
  const PackedShape shape{kind, Float::bf16, codes.shape(0), inputs, group, 4};
  return pack_quantized(shape, codes, scales, nullptr, bias);
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
