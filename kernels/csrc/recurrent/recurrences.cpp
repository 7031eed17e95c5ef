// Recurrences over pools of state slots as graph nodes. A table has each recurrence's inputs, their shapes,
// and the call of its kernel.
//
// A pool [num_slots, ...] is written in place: a node returns a new handle to the same memory, and the old
// handle must not be used again. Each evaluation of a node advances the states once.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <climits>
#include <functional>
#include <optional>
#include <string_view>
#include <tuple>

#include "program/primitive.h"
#include "recurrent/kernels.h"
#include "runtime/dispatch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Axes = std::vector<const char*>;
using Task = std::function<void()>;

// Lengths of axes by name. Axes "K - 1" and "K" give each other's length.
class Lengths {
 public:
  // Returns whether `shape` has these axes with their known lengths, and learns the lengths of new axes.
  bool take(const Axes& axes, const mx::Shape& shape) {
    if (shape.size() != axes.size()) return false;
    for (std::size_t i = 0; i < axes.size(); ++i) {
      const bool is_less = std::string_view(axes[i]) == "K - 1";
      const int length = shape[i] + (is_less ? 1 : 0);
      const std::optional<int> known = find(is_less ? "K" : axes[i]);
      if (!known) lengths_.emplace_back(is_less ? "K" : axes[i], length);
      else if (*known != length) return false;
    }
    return true;
  }

  bool has(std::string_view axis) const { return find(axis).has_value(); }
  int operator[](std::string_view axis) const { return find(axis).value(); }

  // Returns text such as "[T, H] = [7, H]"; axes of unknown length have their names.
  std::string text(const Axes& axes) const {
    std::string names, sizes;
    for (const char* const axis : axes) {
      const std::optional<int> known = find(axis);
      names += (names.empty() ? "" : ", ") + std::string(axis);
      sizes += (sizes.empty() ? "" : ", ") + (known ? std::to_string(*known) : axis);
    }
    return "[" + names + "] = [" + sizes + "]";
  }

 private:
  std::optional<int> find(std::string_view axis) const {
    for (const auto& [name, length] : lengths_)
      if (name == axis) return length;
    return std::nullopt;
  }

  std::vector<std::pair<std::string_view, int>> lengths_;
};

struct Input {
  enum Kind {
    rows,       // rows of any float type, with strides
    whole,      // of any float type, without strides
    gates,      // rows whose last axis may be missing; its length is then 1
    parameter,  // read as float32
    values,     // a parameter of any shape, read as two axes; the length of the second may be unknown
  };
  const char* name;
  Axes axes;
  Kind kind = rows;
};

// Arguments of a kernel, when all arrays have memory.
struct Arguments {
  void* pool;
  Float pool_type;
  StateStep step;
  std::vector<Rows> rows;  // one for each input; without data if it was left out
  std::vector<float> options;
  Lengths lengths;
  void* y;

  float* states() const { return static_cast<float*>(pool); }
  const float* floats(int input) const { return static_cast<const float*>(rows[input].data); }
};

struct Multiple {
  const char* axis;
  int factor, most = INT_MAX;
};

struct Relation {
  const char *axis, *of;
  bool is_divisor = true;  // else the axis has the other axis's length, or 1
};

struct Recurrence {
  const char* name;
  Axes pool;                  // axes of the pool, which is float32 unless keeps_type
  std::vector<Input> inputs;  // the last ones may be left out
  std::size_t num_needed;
  int y;  // index of the input whose shape and type the result has
  std::vector<Multiple> multiples;
  std::vector<Relation> relations;
  std::size_t num_options;
  Task (*task)(const Arguments& a);
  bool keeps_type = false;  // the pool may have the type of y
};

const Recurrence kRecurrences[] = {
    {"octavo.gated_delta",
     {"N", "Hv", "Dv", "Dk"},
     {{"q", {"T", "Hk", "Dk"}},
      {"k", {"T", "Hk", "Dk"}},
      {"v", {"T", "Hv", "Dv"}},
      {"a", {"T", "Hv", "Da"}, Input::gates},
      {"b", {"T", "Hv"}},
      {"dt_bias", {"Hv", "Da"}, Input::values},
      {"A_log", {"Hv", "DA"}, Input::values}},
     5,
     2,
     {{"Dk", 16, 256}},
     {{"Hk", "Hv"}, {"Da", "Dk", false}, {"DA", "Da", false}},
     3,
     [](const Arguments& a) -> Task {
       const Lengths& at = a.lengths;
       require(a.options[0] >= 0 && a.options[0] <= 2, "option 0 must be a kind of gates, 0 to 2");
       const Gates gates = static_cast<Gates>(static_cast<int>(a.options[0]));
       const bool has_parameters = a.rows[6].data != nullptr;
       require(has_parameters == (gates != Gates::ready), "gates of this kind need A_log and dt_bias");
       const DeltaCall call{a.states(),   a.step,
                            a.rows[0],    a.rows[1],
                            a.rows[2],    a.rows[3],
                            a.rows[4],    a.floats(6),
                            a.floats(5),  gates,
                            a.options[1], a.options[2],
                            at["Da"] > 1, has_parameters && at["DA"] > 1,
                            at["Hk"],     at["Hv"],
                            at["Dk"],     at["Dv"],
                            a.y};
       return [call] { OCTAVO_AT_LEVEL(gated_delta, call); };
     }},
    {"octavo.causal_conv",
     {"N", "K - 1", "C"},
     {{"x", {"T", "C"}}, {"weight", {"K", "C"}, Input::whole}, {"bias", {"C"}, Input::whole}},
     2,
     0,
     {{"K", 1, 64}},
     {},
     1,
     [](const Arguments& a) -> Task {
       const auto [x, weight, bias] = std::tie(a.rows[0], a.rows[1], a.rows[2]);
       const ConvCall call{a.pool,         a.step,         a.pool_type,       x,
                           weight.data,    bias.data,      weight.type,       bias.type,
                           a.lengths["C"], a.lengths["K"], a.options[0] != 0, a.y};
       return [call] { OCTAVO_AT_LEVEL(causal_conv, call); };
     },
     true},
    {"octavo.ssd",
     {"N", "H", "Dh", "Ds"},
     {{"x", {"T", "H", "Dh"}},
      {"B", {"T", "G", "Ds"}},
      {"C", {"T", "G", "Ds"}},
      {"dt", {"T", "H"}},
      {"A_log", {"H"}, Input::parameter},
      {"dt_bias", {"H"}, Input::parameter},
      {"D", {"H"}, Input::parameter}},
     7,
     0,
     {{"Ds", 16}},
     {{"G", "H"}},
     2,
     [](const Arguments& a) -> Task {
       const Lengths& at = a.lengths;
       const SsdCall call{a.states(),  a.step,      a.rows[0],   a.rows[1],    a.rows[2],    a.rows[3],
                          a.floats(4), a.floats(5), a.floats(6), a.options[0], a.options[1], at["H"],
                          at["G"],     at["Dh"],    at["Ds"],    a.y};
       return [call] { OCTAVO_AT_LEVEL(ssd, call); };
     }},
    {"octavo.lightning",
     {"N", "H", "Dk", "Dv"},
     {{"q", {"T", "H", "Dk"}},
      {"k", {"T", "H", "Dk"}},
      {"v", {"T", "H", "Dv"}},
      {"log_decay", {"H"}, Input::parameter}},
     4,
     2,
     {{"Dk", 2}, {"Dv", 16}},
     {},
     1,
     [](const Arguments& a) -> Task {
       const Lengths& at = a.lengths;
       const LightningCall call{a.states(),   a.step,  a.rows[0], a.rows[1], a.rows[2], a.floats(3),
                                a.options[0], at["H"], at["Dk"],  at["Dv"],  a.y};
       return [call] { OCTAVO_AT_LEVEL(lightning, call); };
     }},
    {"octavo.selective_scan",
     {"N", "W", "Ds"},
     {{"x", {"T", "W"}},
      {"d", {"T", "W"}},
      {"B", {"T", "Ds"}},
      {"C", {"T", "Ds"}},
      {"A", {"W", "Ds"}, Input::parameter},
      {"D", {"W"}, Input::parameter}},
     6,
     0,
     {{"Ds", 16}},
     {},
     0,
     [](const Arguments& a) -> Task {
       const ScanCall call{a.states(),  a.step,      a.rows[0],      a.rows[1],       a.rows[2], a.rows[3],
                           a.floats(4), a.floats(5), a.lengths["W"], a.lengths["Ds"], a.y};
       return [call] { OCTAVO_AT_LEVEL(selective_scan, call); };
     }},
    {"octavo.rg_lru",
     {"N", "W"},
     {{"x", {"T", "W"}}, {"input_gate", {"T", "W"}}, {"a_gate", {"T", "W"}}, {"c", {"W"}, Input::parameter}},
     4,
     0,
     {},
     {},
     0,
     [](const Arguments& a) -> Task {
       const LruCall call{a.states(), a.step,      a.rows[0],      a.rows[1],
                          a.rows[2],  a.floats(3), a.lengths["W"], a.y};
       return [call] { OCTAVO_AT_LEVEL(rg_lru, call); };
     }},
    {"octavo.wkv7",
     {"N", "H", "D", "D"},
     {{"r", {"T", "H", "D"}},
      {"w", {"T", "H", "D"}},
      {"k", {"T", "H", "D"}},
      {"v", {"T", "H", "D"}},
      {"a", {"T", "H", "D"}},
      {"b", {"T", "H", "D"}}},
     6,
     0,
     {{"D", 16}},
     {},
     0,
     [](const Arguments& a) -> Task {
       const WkvCall call{a.states(), a.step,    a.rows[0],      a.rows[1],      a.rows[2], a.rows[3],
                          a.rows[4],  a.rows[5], a.lengths["H"], a.lengths["D"], a.y};
       return [call] { OCTAVO_AT_LEVEL(wkv7, call); };
     }},
};

// Throws std::invalid_argument unless these are int32 arrays that assign rows to states, see StateStep.
void require_step(const mx::array& segments, const mx::array& checkpoints) {
  const auto ints = [](const char* name, const mx::array& x, const char* axes, int columns) {
    require(x.dtype() == mx::int32 && x.ndim() == 2 && x.shape(1) == columns,
            std::string(name) + " must be int32 " + axes + ", got " + array_text(x));
  };
  ints("segments", segments, "[S, 4]", 4);
  ints("checkpoints", checkpoints, "[C, 2]", 2);
}

// Makes a node's step, with `rows` rows and `slots` slots, from its inputs 1 and 2: segments, checkpoints.
StateStep step_of(const std::vector<mx::array>& inputs, int rows, int slots, Encoder& encoder) {
  const mx::array segments = row_contiguous(inputs[1], encoder);
  const mx::array checkpoints = row_contiguous(inputs[2], encoder);
  return {segments.data<int32_t>(),
          checkpoints.data<int32_t>(),
          segments.shape(0),
          checkpoints.shape(0),
          rows,
          slots};
}

// Returns an input's rows along its first axis. Copies the input if its rows are not contiguous or, for
// `whole`, if the entire input is not.
Rows rows_of(const mx::array& input, Input::Kind kind, Encoder& encoder) {
  int64_t expected = 1;
  bool dense = kind != Input::whole || input.flags().row_contiguous;
  for (int i = static_cast<int>(input.ndim()) - 1; i > 0; expected *= input.shape(i--))
    dense = dense && (input.shape(i) == 1 || input.strides(i) == expected);
  if (dense) return {input.data<void>(), input.strides(0), float_of(input.dtype())};
  const mx::array copy = row_contiguous(input, encoder);
  return {copy.data<void>(), expected, float_of(copy.dtype())};
}

// Inputs: pool, segments, checkpoints, then the recurrence's inputs. Outputs: pool, y.
class RecurrenceNode : public CpuPrimitive {
 public:
  static constexpr int kFirstInput = 3;

  RecurrenceNode(mx::Stream stream, const Recurrence& kind, Lengths lengths, std::vector<float> options)
      : CpuPrimitive(stream), kind_(kind), lengths_(std::move(lengths)), options_(std::move(options)) {}

  const char* name() const override { return kind_.name; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    require(inputs[0].flags().row_contiguous, "a pool must be row contiguous");
    outputs[0].copy_shared_buffer(inputs[0]);
    allocate(outputs[1]);
    Arguments arguments{outputs[0].data<void>(),
                        float_of(inputs[0].dtype()),
                        step_of(inputs, lengths_["T"], lengths_["N"], encoder),
                        std::vector<Rows>(kind_.inputs.size(), Rows{nullptr, 0, Float::f32}),
                        options_,
                        lengths_,
                        outputs[1].data<void>()};
    for (std::size_t i = kFirstInput; i < inputs.size(); ++i)
      arguments.rows[i - kFirstInput] = rows_of(inputs[i], kind_.inputs[i - kFirstInput].kind, encoder);
    encoder.dispatch(kind_.task(arguments));
  }

 private:
  const Recurrence& kind_;
  Lengths lengths_;
  std::vector<float> options_;
};

// Returns the input as nodes read it; throws std::invalid_argument unless it has these axes.
mx::array checked(const Input& input, const mx::array& x, Lengths& lengths, mx::Stream stream) {
  mx::Shape shape = x.shape();
  if (input.kind == Input::gates && shape.size() + 1 == input.axes.size()) shape.push_back(1);
  if (input.kind == Input::values) {
    const int first = lengths[input.axes[0]];
    shape = {first, static_cast<int>(x.size()) / first};
  }
  std::size_t size = 1;
  for (const int length : shape) size *= length;
  const bool is_right = size == x.size() && lengths.take(input.axes, shape);
  require_floats(input.name, x, is_right, lengths.text(input.axes));
  if (input.kind != Input::parameter && input.kind != Input::values) return x;
  return mx::contiguous(mx::reshape(mx::astype(x, mx::float32, stream), shape, stream), false, stream);
}

std::pair<mx::array, mx::array> recurrence(const std::string& name, const mx::array& pool,
                                           const mx::array& segments, const mx::array& checkpoints,
                                           const std::vector<mx::array>& given, std::vector<float> options) {
  const auto* const found =
      std::find_if(std::begin(kRecurrences), std::end(kRecurrences),
                   [&](const Recurrence& each) { return each.name == "octavo." + name; });
  require(found != std::end(kRecurrences), "unknown recurrence " + name);
  const Recurrence& kind = *found;
  require_step(segments, checkpoints);
  require(
      given.size() >= kind.num_needed && given.size() <= kind.inputs.size(),
      name + " needs " + std::to_string(kind.num_needed) + " inputs, got " + std::to_string(given.size()));
  require(options.size() == kind.num_options, name + " needs " + std::to_string(kind.num_options) +
                                                  " options, got " + std::to_string(options.size()));
  const mx::Dtype y_type = given[kind.y].dtype();
  Lengths lengths;
  require(pool.size() > 0 && lengths.take(kind.pool, pool.shape()),
          "pool must be " + lengths.text(kind.pool) + " with slots, got " + shape_text(pool));
  require(pool.dtype() == mx::float32 || (kind.keeps_type && pool.dtype() == y_type),
          "a pool of " + dtype_text(pool.dtype()) + " does not hold inputs of " + dtype_text(y_type));
  for (const auto& [axis, factor, most] : kind.multiples)
    require(lengths[axis] % factor == 0 && lengths[axis] <= most,
            std::string(axis) + " must be a multiple of " + std::to_string(factor) +
                (most == INT_MAX ? "" : ", at most " + std::to_string(most)) + ", got " +
                std::to_string(lengths[axis]));
  const mx::Stream stream = cpu_stream({});
  std::vector<mx::array> inputs{pool, segments, checkpoints};
  for (std::size_t i = 0; i < given.size(); ++i)
    inputs.push_back(checked(kind.inputs[i], given[i], lengths, stream));
  for (const auto& [axis, of, is_divisor] : kind.relations) {
    if (!lengths.has(axis)) continue;  // axis of an input that was left out
    const int length = lengths[axis], other = lengths[of];
    require(is_divisor ? length > 0 && other % length == 0 : length == 1 || length == other,
            std::string(axis) + (is_divisor ? " must divide " : " must be 1 or ") + of + " = " +
                std::to_string(other) + ", got " + std::to_string(length));
  }
  const mx::Shape y = given[kind.y].shape();
  const std::vector<mx::array> out = mx::array::make_arrays(
      {pool.shape(), y}, {pool.dtype(), y_type},
      std::make_shared<RecurrenceNode>(stream, kind, std::move(lengths), std::move(options)),
      std::move(inputs));
  return {out[0], out[1]};
}

// ---- rows after which a state is not finite ----

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
  require(row >= 0 && row < call.step.num_rows, "row " + std::to_string(row) + " is outside the " +
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
  require_step(segments, checkpoints);
  require_floats("y", y, y.ndim() >= 2, "[T, ...]");
  require(flags.dtype() == mx::int32 && flags.shape() == mx::Shape{y.shape(0)},
          "flags must be int32 [" + std::to_string(y.shape(0)) + "], got " + array_text(flags));
  return mx::array(flags.shape(), mx::int32, std::make_shared<MarkNonfinite>(cpu_stream({})),
                   {flags, segments, checkpoints, y});
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  m.def("recurrence", &recurrence, "name"_a, "pool"_a, "segments"_a, "checkpoints"_a, "inputs"_a, "options"_a,
        "Compute a recurrence over slots; return the pool and y. See octavo.kernels.cpu.recurrent.");
  m.def(
      "mark_nonfinite", &mark_nonfinite, "flags"_a, "segments"_a, "checkpoints"_a, "y"_a,
      "Set flags, int32 [T], to 1 in place for rows of y [T, ...] with NaN or infinity, among the last rows "
      "of segments and rows with a checkpoint. A state with NaN or infinity gives such a y.");
}

}  // namespace octavo
