#include "recurrent/node.h"

namespace octavo {
namespace {

void run(const ConvCall& call) { OCTAVO_AT_LEVEL(causal_conv, call); }

// pool, segments, checkpoints, x, weight, and the bias if there is one.
class CausalConv : public RecurrentPrimitive {
 public:
  CausalConv(mx::Stream stream, bool silu) : RecurrentPrimitive(stream), silu_(silu) {}

  const char* name() const override { return "octavo.causal_conv"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    ConvCall call{};
    call.pool = take_pool<void>(inputs, outputs);
    call.pool_type = float_of(inputs[0].dtype());
    call.step = step_of(inputs, encoder);
    call.x = rows_of(inputs[kFirstInput], encoder);
    const mx::array weight = row_contiguous(inputs[kFirstInput + 1], encoder);
    call.weight = weight.data<void>();
    call.weight_type = float_of(weight.dtype());
    call.taps = weight.shape(0);
    call.channels = weight.shape(1);
    if (inputs.size() > kFirstInput + 2) {
      const mx::array bias = row_contiguous(inputs[kFirstInput + 2], encoder);
      call.bias = bias.data<void>();
      call.bias_type = float_of(bias.dtype());
    }
    call.silu = silu_;
    call.y = outputs[1].data<void>();
    encoder.dispatch([call] { run(call); });
  }

 private:
  bool silu_;
};

}  // namespace

PoolAndRows causal_conv(const mx::array& pool, const StepArrays& step, const mx::array& x,
                        const mx::array& weight, const MaybeArray& bias, bool silu,
                        mx::StreamOrDevice stream) {
  require_step(pool, step);
  require(weight.ndim() == 2 && weight.shape(0) >= 2 && weight.shape(0) <= 64,
          "weight must be [K, C] with K from 2 to 64, got " + shape_text(weight));
  const int taps = weight.shape(0), channels = weight.shape(1);
  require_shape("weight", weight, {taps, channels});
  require_shape("pool", pool, {pool.shape(0), taps - 1, channels});
  require(x.ndim() == 2, "x must be [T, C], got " + shape_text(x));
  require_shape("x", x, {x.shape(0), channels});
  require(pool.dtype() == x.dtype() || pool.dtype() == mx::float32,
          "a pool of " + dtype_text(pool.dtype()) + " does not hold inputs of " + dtype_text(x.dtype()));
  std::vector<mx::array> inputs{pool, step.segments, step.checkpoints, x, weight};
  if (bias) {
    require_shape("bias", *bias, {channels});
    inputs.push_back(*bias);
  }
  return make_node(std::make_shared<CausalConv>(cpu_stream(stream), silu), std::move(inputs), x.shape(),
                   x.dtype());
}

}  // namespace octavo
