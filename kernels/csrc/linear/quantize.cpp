// Quantization of weights to MLX's affine format on all threads, at load. MLX's own operations use one
// thread, and per-channel scales would need copies of a layer in wider types.
#include "linear/quantize.h"

#include <nanobind/nanobind.h>

#include "program/primitive.h"
#include "runtime/dispatch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// MLX primitive: floats, or codes with scales and biases, become new codes, scales and biases.
class Quantize : public CpuPrimitive {
 public:
  Quantize(mx::Stream stream, int group, int bits, bool by_channels)
      : CpuPrimitive(stream), group_(group), bits_(bits), by_channels_(by_channels) {}

  const char* name() const override {
    return by_channels_ ? "octavo.quantize_channels" : "octavo.quantize_weights";
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    std::vector<mx::array> plain;
    for (const mx::array& input : inputs) plain.push_back(row_contiguous(input, encoder));
    for (mx::array& output : outputs) allocate(output);
    const mx::array& scales = outputs[1];
    const QuantizeCall call{plain[0].data<void>(),
                            plain.size() > 1 ? plain[1].data<void>() : nullptr,
                            plain.size() > 1 ? plain[2].data<void>() : nullptr,
                            float_of(scales.dtype()),
                            static_cast<int64_t>(scales.size() / scales.shape(-1)),
                            scales.shape(-1) * group_,
                            group_,
                            bits_,
                            outputs[0].data<uint32_t>(),
                            outputs[1].data<void>(),
                            outputs[2].data<void>()};
    encoder.dispatch([call, by_channels = by_channels_] {
      if (by_channels) OCTAVO_AT_LEVEL(quantize_channels, call);
      else OCTAVO_AT_LEVEL(quantize_weights, call);
    });
  }

 private:
  int group_, bits_;
  bool by_channels_;
};

void check_settings(int group_size, int bits) {
  require(bits == 4 || bits == 8, "bits must be 4 or 8, got " + std::to_string(bits));
  require(group_size == 32 || group_size == 64 || group_size == 128,
          "group_size must be 32, 64 or 128, got " + std::to_string(group_size));
}

nb::tuple quantized(const std::vector<mx::array>& inputs, mx::Shape codes, mx::Dtype type, int group_size,
                    int bits, bool by_channels) {
  mx::Shape groups = codes;
  groups.back() = codes.back() * 32 / bits / group_size;
  const std::vector<mx::array> results = mx::array::make_arrays(
      {codes, groups, groups}, {mx::uint32, type, type},
      std::make_shared<Quantize>(cpu_stream({}), group_size, bits, by_channels), inputs);
  return nb::make_tuple(results[0], results[1], results[2]);
}

template <bool by_channels>
nb::tuple quantize(const mx::array& w, int group_size, int bits) {
  check_settings(group_size, bits);
  require_floats("w", w, w.ndim() >= 2 && w.size() > 0 && w.shape(-1) % group_size == 0,
                 "[..., outputs, inputs], whole groups of " + std::to_string(group_size));
  mx::Shape codes = w.shape();
  codes.back() = w.shape(-1) * bits / 32;
  return quantized({w}, codes, w.dtype(), group_size, bits, by_channels);
}

nb::tuple requantize_channels(const mx::array& codes, const mx::array& scales, const mx::array& biases,
                              int group_size, int bits) {
  check_settings(group_size, bits);
  require(codes.ndim() >= 2 && codes.size() > 0 && codes.dtype() == mx::uint32 &&
              codes.shape(-1) * (32 / bits) % group_size == 0,
          "codes must be uint32 [..., outputs, words], whole groups of " + std::to_string(group_size) +
              " codes of " + std::to_string(bits) + " bits, got " + array_text(codes));
  mx::Shape groups = codes.shape();
  groups.back() = codes.shape(-1) * (32 / bits) / group_size;
  for (const mx::array& each : {scales, biases})
    require(each.shape() == groups && is_float(each.dtype()) && each.dtype() == scales.dtype(),
            "scales and biases must share a type out of bfloat16, float16 and float32 and have one value per "
            "group of codes " +
                shape_text(codes) + ", got " + array_text(each));
  return quantized({codes, scales, biases}, codes.shape(), scales.dtype(), group_size, bits, true);
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def("quantize_weights", &quantize<false>, "w"_a, nb::kw_only(), "group_size"_a, "bits"_a,
        "Return (codes, scales, biases) of w [..., outputs, inputs], bit-identical to mx.quantize in affine "
        "mode with 4 or 8 bits.");
  m.def("quantize_channels", &quantize<true>, "w"_a, nb::kw_only(), "group_size"_a, "bits"_a,
        "Return (codes, scales, biases) of w [..., outputs, inputs], bit-identical to "
        "kernels.channel_weights: w8a8 with 8 bits, w4a8 with 4.");
  m.def("requantize_channels", &requantize_channels, "codes"_a, "scales"_a, "biases"_a, nb::kw_only(),
        "group_size"_a, "bits"_a,
        "Return quantize_channels of weights in MLX's affine format with the same bits and groups. "
        "Bit-identical to mx.dequantize followed by quantize_channels, but without a float copy of all "
        "weights.");
}

}  // namespace octavo
