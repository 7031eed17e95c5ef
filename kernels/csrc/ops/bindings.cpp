#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <variant>

#include "mlx/compile.h"
#include "ops/graph.h"
#include "ops/views.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

mx::array rope_at(const mx::array& x, const std::variant<int, mx::array>& offset,
                  const mx::array& inverse_frequencies, int dims, bool interleaved, float position_scale,
                  float value_scale, mx::StreamOrDevice stream) {
  const mx::array at =
      std::holds_alternative<int>(offset) ? mx::array(std::get<int>(offset)) : std::get<mx::array>(offset);
  return rope(x, at, inverse_frequencies, {dims, interleaved, position_scale, value_scale}, stream);
}

}  // namespace

void bind_ops(nb::module_& m) {
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a.none(), "eps"_a, nb::kw_only(), "fuse"_a = false,
        "stream"_a = nb::none(),
        "Return x / sqrt(mean(x^2) + eps) * weight over the last axis. With `fuse`, if x is an unevaluated "
        "sum, the same kernel also computes and stores x.");
  m.def("layer_norm", &layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a, nb::kw_only(),
        "fuse"_a = false, "stream"_a = nb::none(),
        "Return (x - mean) / sqrt(variance + eps) * weight + bias over the last axis; `fuse`: see rms_norm.");
  m.def("gated", &gated, "gate"_a, "up"_a.none(), "activation"_a, nb::kw_only(), "stream"_a = nb::none(),
        "Return activation(gate) * up, or activation(gate); silu, gelu, gelu_tanh or gelu_sigmoid.");
  m.def("rope", &rope_at, "x"_a, "offset"_a, "inverse_frequencies"_a, nb::kw_only(), "dims"_a,
        "interleaved"_a = false, "position_scale"_a = 1.0f, "value_scale"_a = 1.0f, "stream"_a = nb::none(),
        "Return the rotary embedding of x [B, H, L, D] or [B, L, D]; token l of b has position offset[b] + "
        "l.");
  m.def("shortcut", &shortcut, "x"_a,
        "Return x with fewer graph nodes: several shape operations after a native kernel become one.");
  m.def("rows_behind", &rows_behind, "x"_a, "count"_a,
        "Return x[0, count:] for x [1, count + T, ...]. If x is an unevaluated concatenation of `count` rows "
        "and an array, return that array.");
  m.def(
      "same_array", [](const mx::array& a, const mx::array& b) { return a.id() == b.id(); }, "a"_a, "b"_a,
      "Return whether both arrays are the same graph node.");
}

}  // namespace octavo
