#include "ops/ops.h"

#include "linear/linear.h"
#include "ops/graph.h"
#include "ops/views.h"
#include "program/primitive.h"
#include "runtime/dispatch.h"

namespace octavo {
namespace {

// Inputs: x, then added, weight and bias if present. Outputs: y, and the sum if there is `added`.
class Norm : public CpuPrimitive {
 public:
  Norm(mx::Stream stream, bool centered, float eps, bool adds, bool has_weight, bool has_bias)
      : CpuPrimitive(stream),
        eps_(eps),
        centered_(centered),
        adds_(adds),
        has_weight_(has_weight),
        has_bias_(has_bias) {}

  const char* name() const override {
    if (centered_) return adds_ ? "octavo.add_layer_norm" : "octavo.layer_norm";
    return adds_ ? "octavo.add_rms_norm" : "octavo.rms_norm";
  }
  bool computes_rows(const mx::array& /*x*/) const override { return true; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    std::vector<mx::array> plain;
    for (const mx::array& input : inputs) plain.push_back(row_contiguous(input, encoder));
    for (mx::array& output : outputs) allocate(output);
    if (plain[0].size() == 0) return;
    NormCall call{};
    call.x = plain[0].data<void>();
    std::size_t next = 1;
    if (adds_) {
      call.added = plain[next++].data<void>();
      call.sum = outputs[1].data<void>();
    }
    if (has_weight_) {
      call.weight_type = float_of(plain[next].dtype());
      call.weight = plain[next++].data<void>();
    }
    if (has_bias_) {
      call.bias_type = float_of(plain[next].dtype());
      call.bias = plain[next].data<void>();
    }
    call.y = outputs[0].data<void>();
    call.type = float_of(plain[0].dtype());
    call.size = plain[0].shape(-1);
    call.rows = static_cast<int>(plain[0].size() / call.size);
    call.eps = eps_;
    call.centered = centered_;
    encoder.dispatch([call] { OCTAVO_AT_LEVEL(norm, call); });
  }

 private:
  float eps_;
  bool centered_, adds_, has_weight_, has_bias_;
};

// Where rows begin in an input: known from the graph if the input is a view, else from the evaluated array.
struct Rows {
  int64_t offset, stride;
};

class Gated : public CpuPrimitive {
 public:
  Gated(mx::Stream stream, Activation activation, std::vector<std::optional<Rows>> rows)
      : CpuPrimitive(stream), activation_(activation), rows_(std::move(rows)) {}

  const char* name() const override { return "octavo.gated"; }

  // True unless a view's row i lies in another row of its base, or shares a row of the base with other rows.
  bool computes_rows(const mx::array& y) const override {
    const int64_t runs = static_cast<int64_t>(y.size()) / y.shape(-1);
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const mx::array& input = y.inputs()[i];
      if (input.ndim() != y.ndim() || input.shape(0) != y.shape(0)) return false;
      if (!rows_[i]) continue;
      const auto [offset, stride] = *rows_[i];
      if (offset >= stride || stride * runs != static_cast<int64_t>(input.size())) return false;
    }
    return true;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    if (rows_[0]) throw std::runtime_error("octavo.gated reads rows of a fixed shape here");
    return {inputs[0].shape()};
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    mx::array& y = outputs[0];
    allocate(y);
    if (y.size() == 0) return;
    GateCall call{};
    call.y = y.data<void>();
    call.type = float_of(y.dtype());
    call.activation = activation_;
    call.size = y.shape(-1);
    call.y_stride = call.size;
    call.rows = static_cast<int64_t>(y.size()) / call.size;
    call.gate = place(inputs[0], rows_[0], encoder);
    if (inputs.size() > 1) call.up = place(inputs[1], rows_[1], encoder);
    encoder.dispatch([call] { OCTAVO_AT_LEVEL(gated, call); });
  }

 private:
  static StridedRows place(const mx::array& input, const std::optional<Rows>& rows, Encoder& encoder) {
    if (rows) return {input.data<char>() + rows->offset * input.itemsize(), rows->stride};
    if (const auto stride = row_stride(input.shape(), input.strides())) return {input.data<void>(), *stride};
    return {row_contiguous(input, encoder).data<void>(), input.shape(-1)};
  }

  Activation activation_;
  std::vector<std::optional<Rows>> rows_;
};

// Checks a parameter of a norm over the last axis of x.
void require_parameter(const char* name, const mx::array& parameter, const mx::array& x) {
  require_floats(name, parameter, parameter.ndim() == 1 && parameter.shape(0) == x.shape(-1),
                 std::string("[") + std::to_string(x.shape(-1)) + "] like the last axis of x");
}

// Whether x is an unevaluated sum of two arrays with its shape and type.
bool is_plain_sum(const mx::array& x) {
  if (!made_by(x, "Add")) return false;
  for (const mx::array& term : x.inputs())
    if (term.shape() != x.shape() || term.dtype() != x.dtype()) return false;
  return true;
}

mx::array norm(bool centered, mx::array& x, const MaybeArray& weight, const MaybeArray& bias, float eps,
               bool fuse, mx::StreamOrDevice stream) {
  require_floats("x", x, x.ndim() >= 1, "with a last axis");
  const bool adds = fuse && is_plain_sum(x);
  std::vector<mx::array> inputs = adds ? x.inputs() : std::vector<mx::array>{x};
  if (weight) {
    require_parameter("weight", *weight, x);
    inputs.push_back(*weight);
  }
  if (bias) {
    require_parameter("bias", *bias, x);
    inputs.push_back(*bias);
  }
  auto primitive =
      std::make_shared<Norm>(cpu_stream(stream), centered, eps, adds, weight.has_value(), bias.has_value());
  if (!adds) return mx::array(x.shape(), x.dtype(), std::move(primitive), std::move(inputs));
  auto outputs = mx::array::make_arrays({x.shape(), x.shape()}, {x.dtype(), x.dtype()}, primitive, inputs);
  x.overwrite_descriptor(outputs[1]);
  return outputs[0];
}

// Returns the unevaluated array whose rows have the gate followed by `up`, if there is one.
std::optional<mx::array> gate_beside(const mx::array& gate, const std::optional<View>& a,
                                     const std::optional<View>& b) {
  const int64_t size = gate.shape(-1);
  if (!a || !b || a->base.id() != b->base.id() || a->offset != 0 || b->offset != size) return std::nullopt;
  mx::Shape wide = gate.shape();
  wide.back() *= 2;
  if (a->base.shape() != wide) return std::nullopt;
  for (const View* view : {&*a, &*b})
    if (static_cast<int64_t>(gate.size()) > size && row_stride(gate.shape(), view->strides) != 2 * size)
      return std::nullopt;
  return a->base;
}

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  require(name == "gelu_sigmoid",
          "activation must be silu, gelu, gelu_tanh or gelu_sigmoid, got \"" + name + "\"");
  return Activation::gelu_sigmoid;
}

}  // namespace

void run_gated_here(const GateCall& call) { OCTAVO_AT_LEVEL(gated_here, call); }

mx::array rms_norm(mx::array& x, const MaybeArray& weight, float eps, bool fuse, mx::StreamOrDevice stream) {
  return norm(false, x, weight, std::nullopt, eps, fuse, stream);
}

mx::array layer_norm(mx::array& x, const MaybeArray& weight, const MaybeArray& bias, float eps, bool fuse,
                     mx::StreamOrDevice stream) {
  return norm(true, x, weight, bias, eps, fuse, stream);
}

mx::array gated(const mx::array& gate, const MaybeArray& up, const std::string& activation,
                mx::StreamOrDevice stream) {
  require_floats("gate", gate, gate.ndim() >= 1, "with a last axis");
  require(!up || (gate.shape() == up->shape() && gate.dtype() == up->dtype()),
          "up must have the shape and type of gate, " + array_text(gate) +
              (up ? ", got " + array_text(*up) : ""));
  std::vector<mx::array> inputs{gate};
  if (up) inputs.push_back(*up);
  std::vector<std::optional<View>> views;
  for (const mx::array& input : inputs) views.push_back(find_view(input));
  if (const auto both = up ? gate_beside(gate, views[0], views[1]) : std::nullopt)
    if (auto result = linear_gated(*both, activation_of(activation), stream)) return *std::move(result);
  std::vector<std::optional<Rows>> rows(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto stride = views[i] ? row_stride(gate.shape(), views[i]->strides) : std::nullopt;
    if (!stride) continue;
    rows[i] = {views[i]->offset, *stride};
    inputs[i] = views[i]->base;
  }
  auto primitive = std::make_shared<Gated>(cpu_stream(stream), activation_of(activation), std::move(rows));
  return mx::array(gate.shape(), gate.dtype(), std::move(primitive), std::move(inputs));
}

}  // namespace octavo
