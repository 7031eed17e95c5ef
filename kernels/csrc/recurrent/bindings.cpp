#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include "recurrent/recurrent.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

void bind_recurrent(nb::module_& m) {
  m.def(
      "gated_delta",
      [](const mx::array& pool, const mx::array& segments, const mx::array& checkpoints, const mx::array& q,
         const mx::array& k, const mx::array& v, const mx::array& a, const mx::array& b, const MaybeArray& A_log,
         const MaybeArray& dt_bias, const std::string& gates, float lower_bound, float beta_scale,
         mx::StreamOrDevice stream) {
        return gated_delta(pool, {segments, checkpoints}, q, k, v, a, b,
                           {gates, A_log, dt_bias, lower_bound, beta_scale}, stream);
      },
      "pool"_a, "segments"_a, "checkpoints"_a, "q"_a, "k"_a, "v"_a, "a"_a, "b"_a, nb::kw_only(),
      "A_log"_a = nb::none(), "dt_bias"_a = nb::none(), "gates"_a = "ready", "lower_bound"_a = 0.0f,
      "beta_scale"_a = 1.0f, "stream"_a = nb::none(),
      "The gated delta rule over slots: the pool and y. See octavo.kernels.cpu.recurrent.");
  m.def(
      "causal_conv",
      [](const mx::array& pool, const mx::array& segments, const mx::array& checkpoints, const mx::array& x,
         const mx::array& weight, const MaybeArray& bias, bool silu, mx::StreamOrDevice stream) {
        return causal_conv(pool, {segments, checkpoints}, x, weight, bias, silu, stream);
      },
      "pool"_a, "segments"_a, "checkpoints"_a, "x"_a, "weight"_a, "bias"_a = nb::none(), nb::kw_only(),
      "silu"_a = false, "stream"_a = nb::none(),
      "A depthwise causal convolution over slots of earlier inputs: the pool and y.");
}

}  // namespace octavo
