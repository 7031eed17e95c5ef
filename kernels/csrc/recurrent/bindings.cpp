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
         const mx::array& k, const mx::array& v, const mx::array& a, const mx::array& b,
         const MaybeArray& A_log, const MaybeArray& dt_bias, const std::string& gates, float lower_bound,
         float beta_scale, mx::StreamOrDevice stream) {
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
  m.def(
      "ssd",
      [](const mx::array& pool, const mx::array& segments, const mx::array& checkpoints, const mx::array& x,
         const mx::array& B, const mx::array& C, const mx::array& dt, const mx::array& A_log,
         const mx::array& dt_bias, const mx::array& D, float lowest, float highest,
         mx::StreamOrDevice stream) {
        return ssd(pool, {segments, checkpoints}, x, B, C, dt, {A_log, dt_bias, D, lowest, highest}, stream);
      },
      "pool"_a, "segments"_a, "checkpoints"_a, "x"_a, "B"_a, "C"_a, "dt"_a, "A_log"_a, "dt_bias"_a, "D"_a,
      nb::kw_only(), "lowest"_a, "highest"_a, "stream"_a = nb::none(),
      "Mamba-2's recurrence: the pool and y.");
  m.def(
      "lightning",
      [](const mx::array& pool, const mx::array& segments, const mx::array& checkpoints, const mx::array& q,
         const mx::array& k, const mx::array& v, const mx::array& log_decay, float scale,
         mx::StreamOrDevice stream) {
        return lightning(pool, {segments, checkpoints}, q, k, v, log_decay, scale, stream);
      },
      "pool"_a, "segments"_a, "checkpoints"_a, "q"_a, "k"_a, "v"_a, "log_decay"_a, nb::kw_only(), "scale"_a,
      "stream"_a = nb::none(), "Lightning attention: the pool and y.");
  m.def(
      "selective_scan",
      [](const mx::array& pool, const mx::array& segments, const mx::array& checkpoints, const mx::array& x,
         const mx::array& d, const mx::array& B, const mx::array& C, const mx::array& A, const mx::array& D,
         mx::StreamOrDevice stream) {
        return selective_scan(pool, {segments, checkpoints}, x, d, B, C, A, D, stream);
      },
      "pool"_a, "segments"_a, "checkpoints"_a, "x"_a, "d"_a, "B"_a, "C"_a, "A"_a, "D"_a, nb::kw_only(),
      "stream"_a = nb::none(), "Mamba-1's recurrence: the pool and y.");
  m.def(
      "rg_lru",
      [](const mx::array& pool, const mx::array& segments, const mx::array& checkpoints, const mx::array& x,
         const mx::array& input_gate, const mx::array& a_gate, const mx::array& c,
         mx::StreamOrDevice stream) {
        return rg_lru(pool, {segments, checkpoints}, x, input_gate, a_gate, c, stream);
      },
      "pool"_a, "segments"_a, "checkpoints"_a, "x"_a, "input_gate"_a, "a_gate"_a, "c"_a, nb::kw_only(),
      "stream"_a = nb::none(), "The real-gated linear recurrent unit with its gates: the pool and y.");
  m.def(
      "wkv7",
      [](const mx::array& pool, const mx::array& segments, const mx::array& checkpoints, const mx::array& r,
         const mx::array& w, const mx::array& k, const mx::array& v, const mx::array& a, const mx::array& b,
         mx::StreamOrDevice stream) { return wkv7(pool, {segments, checkpoints}, r, w, k, v, a, b, stream); },
      "pool"_a, "segments"_a, "checkpoints"_a, "r"_a, "w"_a, "k"_a, "v"_a, "a"_a, "b"_a, nb::kw_only(),
      "stream"_a = nb::none(), "RWKV-7's recurrence: the pool and y.");
  m.def(
      "mark_nonfinite",
      [](const mx::array& flags, const mx::array& segments, const mx::array& checkpoints, const mx::array& y,
         mx::StreamOrDevice stream) { return mark_nonfinite(flags, {segments, checkpoints}, y, stream); },
      "flags"_a, "segments"_a, "checkpoints"_a, "y"_a, nb::kw_only(), "stream"_a = nb::none(),
      "flags int32 [T], in place: 1 where y [T, ..] holds NaN or infinity in the last row of a segment or in "
      "one that has a checkpoint.");
}

}  // namespace octavo
