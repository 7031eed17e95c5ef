#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "linear/adapters.h"
#include "linear/experts.h"
#include "linear/linear.h"
#include "runtime/roofline.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

void bind_linear(nb::module_& m) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<PackedWeight>(m, "PackedWeight", "A weight matrix [outputs, inputs] in the kernels' layout.")
      .def_prop_ro("outputs", [](const PackedWeight& w) { return w.shape.outputs; })
      .def_prop_ro("inputs", [](const PackedWeight& w) { return w.shape.inputs; })
      .def_prop_ro(
          "dtype", [](const PackedWeight& w) { return packed_dtype(w); },
          "Type of a dense weight, or of the scales of a quantized weight.")
      .def_prop_ro("nbytes", &PackedWeight::num_bytes)
      .def_prop_ro("unread_nbytes", &PackedWeight::num_unread_bytes,
                   "Part of nbytes that only exact products read.");

  using MaybeArray = std::optional<mx::array>;
  m.def(
      "pack_dense",
      [](const mx::array& weight, const MaybeArray& bias) { return pack_dense({weight}, bias); }, "weight"_a,
      "bias"_a = nb::none(), no_gil,
      "Pack a bf16, fp16 or fp32 weight [outputs, inputs]. Evaluates its arguments.");
  m.def("pack_stacked", &pack_dense, "weights"_a, "bias"_a = nb::none(), no_gil,
        "Pack dense weights of the same inputs and type as one weight, which has the outputs of all weights "
        "in order. Evaluates its arguments.");
  m.def(
      "pack_affine",
      [](const mx::array& codes, const mx::array& scales, const mx::array& biases, int group_size, int bits,
         const MaybeArray& bias) { return pack_affine({codes}, {scales}, {biases}, group_size, bits, bias); },
      "codes"_a, "scales"_a, "biases"_a, nb::kw_only(), "group_size"_a, "bits"_a, "bias"_a = nb::none(),
      no_gil,
      "Pack MLX's affine format: 1 to 6 or 8 bits, groups of 32, 64 or 128. Evaluates its arguments.");
  m.def("pack_stacked_affine", &pack_affine, "codes"_a, "scales"_a, "biases"_a, nb::kw_only(), "group_size"_a,
        "bits"_a, "bias"_a = nb::none(), no_gil, "Pack affine weights as one; see pack_stacked.");
  m.def(
      "pack_fp4",
      [](const mx::array& codes, const mx::array& scales, const std::string& mode, const MaybeArray& bias) {
        return pack_fp4({codes}, {scales}, mode, bias);
      },
      "codes"_a, "scales"_a, nb::kw_only(), "mode"_a, "bias"_a = nb::none(), no_gil,
      "Pack MLX's mxfp4 or nvfp4. Evaluates its arguments.");
  m.def("pack_stacked_fp4", &pack_fp4, "codes"_a, "scales"_a, nb::kw_only(), "mode"_a, "bias"_a = nb::none(),
        no_gil, "Pack mxfp4 or nvfp4 weights as one; see pack_stacked.");
  m.def("unpack", &unpack, "weight"_a, no_gil,
        "Return the packed arrays, bit-identical: [weight], [codes, scales, biases] or [codes, scales].");
  m.def("linear", &linear, "x"_a, "weight"_a, nb::kw_only(), "residual"_a = nb::none(), "exact"_a = false,
        "stream"_a = nb::none(), "Return x W^T + bias + residual [..., outputs] for x [..., inputs].");
  m.def(
      "linear_argmax",
      [](const mx::array& x, const Packed& weight, bool exact, mx::StreamOrDevice stream) {
        const std::vector<mx::array> results = linear_argmax(x, weight, exact, stream);
        return nb::make_tuple(results[0], results[1]);
      },
      "x"_a, "weight"_a, nb::kw_only(), "exact"_a = false, "stream"_a = nb::none(),
      "Return the arg-max of linear (the lowest of equal ones), int32 [...], and its value, float32 [...].");
  nb::class_<PackedExperts>(m, "PackedExperts", "Packed weights of one shape, one per expert.")
      .def(nb::init<std::vector<Packed>>(), "experts"_a)
      .def_prop_ro("experts", [](const PackedExperts& e) { return e.weights; })
      .def_prop_ro("outputs", [](const PackedExperts& e) { return e.shape().outputs; })
      .def_prop_ro("inputs", [](const PackedExperts& e) { return e.shape().inputs; })
      .def_prop_ro("nbytes", &PackedExperts::nbytes)
      .def_prop_ro("unread_nbytes", &PackedExperts::unread_nbytes);
  m.def("gather_linear", &gather_linear, "x"_a, "experts"_a, "ids"_a, nb::kw_only(), "exact"_a = false,
        "stream"_a = nb::none(),
        "Return linear of each block x [..., M, inputs] with the expert of its id [...]: [..., M, outputs].");
  nb::class_<AdapterFactors>(m, "AdapterFactors",
                             "LoRA factors of one adapter and layer, in the kernels' layout.")
      .def_prop_ro("nbytes", &AdapterFactors::num_bytes);
  m.def(
      "adapter_factors",
      [](const mx::array& a, const mx::array& b, float scale, const MaybeArray& gain,
         const MaybeArray& bias) {
        return std::const_pointer_cast<AdapterFactors>(make_factors(a, b, scale, gain, bias));
      },
      "a"_a, "b"_a, nb::kw_only(), "scale"_a, "gain"_a = nb::none(), "bias"_a = nb::none(), no_gil,
      "Pack a [experts, rank, inputs], b [experts, rank, outputs], gain and bias [outputs]. Evaluates them.");
  nb::class_<AdapterTable>(m, "AdapterTable", "LoRA factors by slot, for layers that have the same input.")
      .def(nb::init<int, std::vector<int>, int, int>(), "inputs"_a, "outputs"_a, "experts"_a, "num_slots"_a)
      .def(
          "put",
          [](AdapterTable& table, int slot, int part, std::shared_ptr<AdapterFactors> factors) {
            table.put(slot, part, std::move(factors));
          },
          "slot"_a, "part"_a, "factors"_a, "Put factors into a slot, between two steps.")
      .def("clear", &AdapterTable::clear, "slot"_a, "Empty a slot, between two steps.");
  m.def("add_adapters", &add_adapters, "y"_a, "x"_a, "slots"_a, "table"_a, nb::kw_only(),
        "stream"_a = nb::none(),
        "Return y [..., outputs] plus each row's adapter applied to x [..., inputs]; slot 0 adds nothing.");
  m.def("add_expert_adapters", &add_expert_adapters, "y"_a, "x"_a, "places"_a, "table"_a, nb::kw_only(),
        "stream"_a = nb::none(), "Add adapters of experts; places [...] are slot * experts + expert.");
  m.def("take_rows", &take_rows, "weight"_a, "ids"_a, nb::kw_only(), "stream"_a = nb::none(),
        "Return rows of W, [..., inputs], by ids [...].");
  m.def(
      "measure_flops", &measure_flops, no_gil,
      "Measure float32 and bf16 operations per second in registers, with the threads and instruction set in "
      "use; 0 if it has no bf16 products.");
}

}  // namespace octavo
