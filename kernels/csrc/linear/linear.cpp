#include "linear/linear.h"

#include "linear/kernels.h"
#include "ops/views.h"
#include "program/primitive.h"
#include "runtime/threads.h"

namespace octavo {
namespace {

class Linear : public CpuPrimitive {
 public:
  Linear(mx::Stream stream, Packed weight, bool exact, std::optional<Activation> gate = std::nullopt)
      : CpuPrimitive(stream), weight_(std::move(weight)), exact_(exact), gate_(gate) {}

  const char* name() const override { return gate_ ? "octavo.linear_gated" : "octavo.linear"; }
  const Packed& weight() const { return weight_; }
  bool exact() const { return exact_; }
  bool computes_rows(const mx::array& /*x*/) const override { return true; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    const mx::array x = row_contiguous(inputs[0], encoder);
    mx::array& y = outputs[0];
    allocate(y);
    const void* residual = inputs.size() > 1 ? row_contiguous(inputs[1], encoder).data<void>() : nullptr;
    if (y.size() == 0) return;
    const int rows = static_cast<int>(y.size() / y.shape(-1));
    const LinearCall call{weight_.get(),       x.data<void>(), y.data<void>(), residual, float_of(x.dtype()),
                          float_of(y.dtype()), rows,           exact_,         nullptr,  gate_};
    encoder.dispatch([call, keep = weight_] { run_linear(call); });
  }

 private:
  Packed weight_;
  bool exact_;
  std::optional<Activation> gate_;
};

class LinearArgMax : public CpuPrimitive {
 public:
  LinearArgMax(mx::Stream stream, Packed weight, Float type, bool exact)
      : CpuPrimitive(stream), weight_(std::move(weight)), type_(type), exact_(exact) {}

  const char* name() const override { return "octavo.linear_argmax"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    const mx::array x = row_contiguous(inputs[0], encoder);
    for (mx::array& output : outputs) allocate(output);
    const int rows = static_cast<int>(outputs[0].size());
    if (rows == 0) return;
    LinearCall call{weight_.get(),       x.data<void>(), nullptr, nullptr,
                    float_of(x.dtype()), type_,          rows,    exact_};
    encoder.dispatch([call, keep = weight_, ids = outputs[0].data<int32_t>(),
                      logits = outputs[1].data<float>()]() mutable {
      const int panels = call.weight->shape.num_panels();
      std::vector<Largest> largest(static_cast<std::size_t>(panels) * call.rows);
      call.largest = largest.data();
      run_linear(call);
      for (int row = 0; row < call.rows; ++row) {
        Largest best = largest[row];
        for (int p = 1; p < panels; ++p) {
          const Largest& other = largest[static_cast<std::size_t>(p) * call.rows + row];
          if (other.key > best.key) best = other;
        }
        ids[row] = best.output;
        logits[row] = float_of_key(best.key);
      }
    });
  }

 private:
  Packed weight_;
  Float type_;
  bool exact_;
};

class TakeRows : public CpuPrimitive {
 public:
  TakeRows(mx::Stream stream, Packed weight) : CpuPrimitive(stream), weight_(std::move(weight)) {}

  const char* name() const override { return "octavo.take_rows"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    const mx::array ids = row_contiguous(inputs[0], encoder);
    allocate(outputs[0]);
    encoder.dispatch([weight = weight_, ids = ids.data<int32_t>(), count = static_cast<int>(ids.size()),
                      out = outputs[0].data<void>(), type = float_of(outputs[0].dtype())] {
      const int outputs = weight->shape.outputs, inputs = weight->shape.inputs;
      for (int i = 0; i < count; ++i)
        require(ids[i] >= -outputs && ids[i] < outputs,
                "row " + std::to_string(ids[i]) + " is outside the " + std::to_string(outputs) + " rows");
      parallel_for(count, [&](int i) {
        float* row = static_cast<float*>(thread_scratch(sizeof(float) * inputs));
        weight->row(ids[i] < 0 ? ids[i] + outputs : ids[i], row);
        store_floats(out, type, static_cast<std::size_t>(i) * inputs, inputs, row);
      });
    });
  }

 private:
  Packed weight_;
};

}  // namespace

mx::Dtype packed_dtype(const PackedWeight& weight) {
  switch (weight.shape.scale_type) {
    case Float::bf16: return mx::bfloat16;
    case Float::f16: return mx::float16;
    case Float::f32: break;
  }
  return mx::float32;
}

mx::Dtype result_dtype(const mx::array& x, const PackedWeight& weight) {
  const bool own_type = !weight.shape.quantized() || weight.shape.affine();
  return own_type ? mx::promote_types(x.dtype(), packed_dtype(weight)) : x.dtype();
}

namespace {

void check_x(const mx::array& x, const PackedShape& packed) {
  require_floats("x", x, x.ndim() >= 1 && x.shape(-1) == packed.inputs,
                 "[..., " + std::to_string(packed.inputs) + "] for a weight [" +
                     std::to_string(packed.outputs) + ", " + std::to_string(packed.inputs) + "]");
}

}  // namespace

mx::array linear(const mx::array& x, const Packed& weight, const std::optional<mx::array>& residual,
                 bool exact, mx::StreamOrDevice stream) {
  const PackedShape& packed = weight->shape;
  check_x(x, packed);
  mx::Shape shape = x.shape();
  shape.back() = packed.outputs;
  const mx::Dtype type = result_dtype(x, *weight);
  std::vector<mx::array> inputs{x};
  if (residual) {
    require(residual->shape() == shape && residual->dtype() == type,
            "residual must be " + dtype_text(type) + " and shaped like the result, got " +
                array_text(*residual) + " for x " + shape_text(x));
    inputs.push_back(*residual);
  }
  return mx::array(shape, type, std::make_shared<Linear>(cpu_stream(stream), weight, exact),
                   std::move(inputs));
}

std::optional<mx::array> linear_gated(const mx::array& both, Activation activation,
                                      mx::StreamOrDevice stream) {
  if (!made_by(both, "octavo.linear") || both.inputs().size() != 1) return std::nullopt;
  const auto& made = static_cast<const Linear&>(both.primitive());
  if (made.weight()->shape.outputs % (2 * kPanel) != 0) return std::nullopt;
  mx::Shape shape = both.shape();
  shape.back() /= 2;
  return mx::array(shape, both.dtype(),
                   std::make_shared<Linear>(cpu_stream(stream), made.weight(), made.exact(), activation),
                   both.inputs());
}

std::vector<mx::array> linear_argmax(const mx::array& x, const Packed& weight, bool exact,
                                     mx::StreamOrDevice stream) {
  check_x(x, weight->shape);
  const mx::Shape shape(x.shape().begin(), x.shape().end() - 1);
  const Float type = float_of(result_dtype(x, *weight));
  return mx::array::make_arrays({shape, shape}, {mx::int32, mx::float32},
                                std::make_shared<LinearArgMax>(cpu_stream(stream), weight, type, exact), {x});
}

mx::array take_rows(const Packed& weight, const mx::array& ids, mx::StreamOrDevice stream) {
  require_integers("ids", ids);
  mx::Shape shape = ids.shape();
  shape.push_back(weight->shape.inputs);
  return mx::array(shape, packed_dtype(*weight), std::make_shared<TakeRows>(cpu_stream(stream), weight),
                   {narrow_ids(ids, stream)});
}

}  // namespace octavo
