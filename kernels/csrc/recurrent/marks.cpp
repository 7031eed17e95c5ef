// Marks the rows of a step after which a state is not finite.
#include <nanobind/nanobind.h>

#include <cstdint>

#include "recurrent/step.h"

namespace octavo {
namespace {

// Whether any of these values is NaN or infinite, that is, has all exponent bits set.
template <class Bits>
bool any_nonfinite(const Bits* values, int64_t count, Bits exponent) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) found |= (values[i] & exponent) == exponent;
  return found;
}

struct MarkCall {
  const void* y;
  Float type;
  int64_t size;  // values per row
  StateStep step;
  int32_t* flags;
};

void mark_row(const MarkCall& call, int row) {
  require(row < call.step.num_rows, "row " + std::to_string(row) + " is outside the " +
                                        std::to_string(call.step.num_rows) + " rows of the step");
  const int64_t first = row * call.size;
  const auto halves = [&](uint16_t exponent) {
    return any_nonfinite(static_cast<const uint16_t*>(call.y) + first, call.size, exponent);
  };
  const bool found =
      call.type == Float::f32
          ? any_nonfinite<uint32_t>(static_cast<const uint32_t*>(call.y) + first, call.size, 0x7f800000)
          : halves(call.type == Float::bf16 ? 0x7f80 : 0x7c00);
  if (found) call.flags[row] = 1;
}

void mark(const MarkCall& call) {
  for (int i = 0; i < call.step.num_segments; ++i) {
    const int32_t* const segment = call.step.segments + 4 * i;
    if (segment[1] > 0) mark_row(call, segment[0] + segment[1] - 1);
  }
  for (int i = 0; i < call.step.num_checkpoints; ++i)
    if (const int row = call.step.checkpoints[2 * i]; row >= 0) mark_row(call, row);
}

// Inputs: flags, segments, checkpoints, y. Output: flags.
class MarkNonfinite : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  const char* name() const override { return "octavo.mark_nonfinite"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    outputs[0].copy_shared_buffer(inputs[0]);
    const mx::array y = row_contiguous(inputs[3], encoder);
    const int rows = y.shape(0);
    const int64_t size = rows > 0 ? static_cast<int64_t>(y.size()) / rows : 0;
    const StateStep step = step_of(inputs, rows, 0, encoder);
    const MarkCall call{y.data<void>(), float_of(y.dtype()), size, step, outputs[0].data<int32_t>()};
    encoder.dispatch([call] { mark(call); });
  }
};

mx::array mark_nonfinite(const mx::array& flags, const mx::array& segments, const mx::array& checkpoints,
                         const mx::array& y) {
  StepArrays{segments, checkpoints}.check();
  require_floats("y", y, y.ndim() >= 2, "[T, ...]");
  require(flags.dtype() == mx::int32 && flags.shape() == mx::Shape{y.shape(0)},
          "flags must be int32 [" + std::to_string(y.shape(0)) + "], got " + array_text(flags));
  return mx::array(flags.shape(), mx::int32, std::make_shared<MarkNonfinite>(cpu_stream({})),
                   {flags, segments, checkpoints, y});
}

}  // namespace

void bind_marks(nanobind::module_& m) {
  using namespace nanobind::literals;
  m.def(
      "mark_nonfinite", &mark_nonfinite, "flags"_a, "segments"_a, "checkpoints"_a, "y"_a,
      "Set flags, int32 [T], to 1 in place for rows of y [T, ...] with NaN or infinity, among the last rows "
      "of segments and rows with a checkpoint. A state with NaN or infinity gives such a y.");
}

}  // namespace octavo
