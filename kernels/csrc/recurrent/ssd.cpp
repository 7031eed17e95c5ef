#include "recurrent/node.h"

namespace octavo {
namespace {

void run(const SsdCall& call) { OCTAVO_AT_LEVEL(ssd, call); }

// pool, segments, checkpoints, x, B, C, dt, A_log, dt_bias, D.
class Ssd : public RecurrentPrimitive {
 public:
  Ssd(mx::Stream stream, float lowest, float highest)
      : RecurrentPrimitive(stream), lowest_(lowest), highest_(highest) {}

  const char* name() const override { return "octavo.ssd"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    SsdCall call{};
    call.pool = take_pool<float>(inputs, outputs);
    call.step = step_of(inputs, encoder);
    take_rows(inputs, {&call.x, &call.B, &call.C, &call.dt}, encoder);
    call.A_log = inputs[kFirstInput + 4].data<float>();
    call.dt_bias = inputs[kFirstInput + 5].data<float>();
    call.D = inputs[kFirstInput + 6].data<float>();
    call.lowest = lowest_;
    call.highest = highest_;
    call.H = inputs[0].shape(1);
    call.G = inputs[kFirstInput + 1].shape(1);
    call.Dh = inputs[0].shape(2);
    call.Ds = inputs[0].shape(3);
    call.y = outputs[1].data<void>();
    encoder.dispatch([call] { run(call); });
  }

 private:
  float lowest_, highest_;
};

}  // namespace

PoolAndRows ssd(const mx::array& pool, const StepArrays& step, const mx::array& x, const mx::array& B,
                const mx::array& C, const mx::array& dt, const SsdParameters& parameters,
                mx::StreamOrDevice stream) {
  require_step(pool, step);
  require_pool(pool, "[N, H, Dh, Ds]", 4);
  const int H = pool.shape(1), Dh = pool.shape(2), Ds = pool.shape(3);
  require_multiple("the state's size", Ds, 16);
  require(
      B.ndim() == 3 && B.shape(1) > 0 && H % B.shape(1) == 0,
      "B must be [T, G, Ds] with G a divisor of the " + std::to_string(H) + " heads, got " + shape_text(B));
  const int T = B.shape(0);
  require_shape("B", B, {T, B.shape(1), Ds});
  require_shape("C", C, B.shape());
  require_shape("x", x, {T, H, Dh});
  require_shape("dt", dt, {T, H});
  require_shape("A_log", parameters.A_log, {H});
  require_shape("dt_bias", parameters.dt_bias, {H});
  require_shape("D", parameters.D, {H});
  const mx::Stream cpu = cpu_stream(stream);
  std::vector<mx::array> inputs{pool, step.segments, step.checkpoints, x, B, C, dt};
  for (const mx::array* values : {&parameters.A_log, &parameters.dt_bias, &parameters.D})
    inputs.push_back(parameter(*values, cpu));
  auto primitive = std::make_shared<Ssd>(cpu, parameters.lowest, parameters.highest);
  return make_node(std::move(primitive), std::move(inputs), x.shape(), x.dtype());
}

}  // namespace octavo
