// Dense weights to MLX's affine format on all threads: the bits of mx.quantize, which uses one.
#include "linear/quantize_weights.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include "program/primitive.h"
#include "runtime/dispatch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

void run(const AffineCall& call) { OCTAVO_AT_LEVEL(quantize_weights, call); }

class QuantizeWeights : public CpuPrimitive {
 public:
  QuantizeWeights(mx::Stream stream, int group, int bits)
      : CpuPrimitive(stream), group_(group), bits_(bits) {}

  const char* name() const override { return "octavo.quantize_weights"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    const mx::array w = row_contiguous(inputs[0], encoder);
    for (mx::array& output : outputs) allocate(output);
    AffineCall call{};
    call.weights = w.data<void>();
    call.type = float_of(w.dtype());
    call.groups = static_cast<int64_t>(w.size()) / group_;
    call.group = group_;
    call.bits = bits_;
    call.codes = outputs[0].data<uint32_t>();
    call.scales = outputs[1].data<void>();
    call.biases = outputs[2].data<void>();
    encoder.dispatch([call] { run(call); });
  }

 private:
  int group_, bits_;
};

nb::tuple quantize_weights(const mx::array& w, int group_size, int bits, mx::StreamOrDevice stream) {
  require(bits == 2 || bits == 4 || bits == 8, "bits must be 2, 4 or 8, got " + std::to_string(bits));
  require(group_size == 32 || group_size == 64 || group_size == 128,
          "group_size must be 32, 64 or 128, got " + std::to_string(group_size));
  require(w.ndim() >= 2 && w.size() > 0 && is_float(w.dtype()) && w.shape(-1) % group_size == 0,
          "w must be bfloat16, float16 or float32 [..., inputs], whole groups of " +
              std::to_string(group_size) + ", got " + dtype_text(w.dtype()) + " " + shape_text(w));
  mx::Shape codes = w.shape(), groups = w.shape();
  codes.back() = w.shape(-1) * bits / 32;
  groups.back() = w.shape(-1) / group_size;
  const std::vector<mx::array> results =
      mx::array::make_arrays({codes, groups, groups}, {mx::uint32, w.dtype(), w.dtype()},
                             std::make_shared<QuantizeWeights>(cpu_stream(stream), group_size, bits), {w});
  return nb::make_tuple(results[0], results[1], results[2]);
}

}  // namespace

void bind_quantize_weights(nb::module_& m) {
  m.def("quantize_weights", &quantize_weights, "w"_a, nb::kw_only(), "group_size"_a, "bits"_a,
        "stream"_a = nb::none(),
        "w [..., inputs] -> codes, scales, biases: bit by bit those of mx.quantize, affine with 2, 4 or 8 "
        "bits.");
}

}  // namespace octavo
