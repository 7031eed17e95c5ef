// Weights with one scale per output channel, while loading: MLX's operations take one thread and copies of a
// layer in wider types.
#include "linear/quantize_channels.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include "program/primitive.h"
#include "runtime/dispatch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

void run(const ChannelsCall& call) { OCTAVO_AT_LEVEL(quantize_channels, call); }

class QuantizeChannels : public CpuPrimitive {
 public:
  QuantizeChannels(mx::Stream stream, int group, int bits)
      : CpuPrimitive(stream), group_(group), bits_(bits) {}

  const char* name() const override { return "octavo.quantize_channels"; }

  // Of one array of floats, or of codes, scales and biases.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    std::vector<mx::array> plain;
    for (const mx::array& input : inputs) plain.push_back(row_contiguous(input, encoder));
    for (mx::array& output : outputs) allocate(output);
    ChannelsCall call{};
    call.weights = plain[0].data<void>();
    if (plain.size() > 1) {
      call.scales = plain[1].data<void>();
      call.biases = plain[2].data<void>();
    }
    call.type = float_of(outputs[1].dtype());
    call.inputs = outputs[1].shape(-1) * group_;
    call.rows = static_cast<int64_t>(outputs[1].size() / outputs[1].shape(-1));
    call.group = group_;
    call.bits = bits_;
    call.new_codes = outputs[0].data<uint32_t>();
    call.new_scales = outputs[1].data<void>();
    call.new_biases = outputs[2].data<void>();
    encoder.dispatch([call] { run(call); });
  }

 private:
  int group_, bits_;
};

void check_settings(int group_size, int bits) {
  require(bits == 4 || bits == 8, "bits must be 4 or 8, got " + std::to_string(bits));
  require(group_size == 32 || group_size == 64 || group_size == 128,
          "group_size must be 32, 64 or 128, got " + std::to_string(group_size));
}

nb::tuple quantize(const std::vector<mx::array>& inputs, mx::Shape codes, mx::Dtype type, int group_size,
                   int bits, mx::StreamOrDevice stream) {
  mx::Shape groups = codes;
  groups.back() = codes.back() * (32 / bits) / group_size;
  const std::vector<mx::array> results = mx::array::make_arrays(
      {codes, groups, groups}, {mx::uint32, type, type},
      std::make_shared<QuantizeChannels>(cpu_stream(stream), group_size, bits), inputs);
  return nb::make_tuple(results[0], results[1], results[2]);
}

nb::tuple quantize_channels(const mx::array& w, int group_size, int bits, mx::StreamOrDevice stream) {
  check_settings(group_size, bits);
  require(w.ndim() >= 2 && w.size() > 0 && is_float(w.dtype()) && w.shape(-1) % group_size == 0,
          "w must be bfloat16, float16 or float32 [..., outputs, inputs], whole groups of " +
              std::to_string(group_size) + ", got " + dtype_text(w.dtype()) + " " + shape_text(w));
  mx::Shape codes = w.shape();
  codes.back() = w.shape(-1) * bits / 32;
  return quantize({w}, codes, w.dtype(), group_size, bits, stream);
}

nb::tuple requantize_channels(const mx::array& codes, const mx::array& scales, const mx::array& biases,
                              int group_size, int bits, mx::StreamOrDevice stream) {
  check_settings(group_size, bits);
  require(codes.ndim() >= 2 && codes.size() > 0 && codes.dtype() == mx::uint32 &&
              codes.shape(-1) * (32 / bits) % group_size == 0,
          "codes must be uint32 [..., outputs, words], whole groups of " + std::to_string(group_size) +
              " codes of " + std::to_string(bits) + " bits, got " + dtype_text(codes.dtype()) + " " +
              shape_text(codes));
  mx::Shape groups = codes.shape();
  groups.back() = codes.shape(-1) * (32 / bits) / group_size;
  for (const mx::array& each : {scales, biases}) {
    require(each.shape() == groups && is_float(each.dtype()) && each.dtype() == scales.dtype(),
            "scales and biases must share a type out of bfloat16, float16 and float32 and have one value per "
            "group of codes " +
                shape_text(codes) + ", got " + dtype_text(each.dtype()) + " " + shape_text(each));
  }
  return quantize({codes, scales, biases}, codes.shape(), scales.dtype(), group_size, bits, stream);
}

}  // namespace

void bind_quantize_channels(nb::module_& m) {
  m.def("quantize_channels", &quantize_channels, "w"_a, nb::kw_only(), "group_size"_a, "bits"_a,
        "stream"_a = nb::none(),
        "w [..., outputs, inputs] -> codes, scales, biases: bit by bit those of "
        "kernels.channel_weights, w8a8 with 8 bits and w4a8 with 4.");
  m.def("requantize_channels", &requantize_channels, "codes"_a, "scales"_a, "biases"_a, nb::kw_only(),
        "group_size"_a, "bits"_a, "stream"_a = nb::none(),
        "The same of weights in MLX's affine format of as many bits and such groups, without a copy of all "
        "in floats: the bits of mx.dequantize between the two.");
}

}  // namespace octavo
