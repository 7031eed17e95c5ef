#include "recurrent/node.h"

namespace octavo {
namespace {

void run(const LightningCall& call) { OCTAVO_AT_LEVEL(lightning, call); }

// pool, segments, checkpoints, q, k, v, log_decay.
class Lightning : public RecurrentPrimitive {
 public:
  Lightning(mx::Stream stream, float scale) : RecurrentPrimitive(stream), scale_(scale) {}

  const char* name() const override { return "octavo.lightning"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    LightningCall call{};
    call.pool = take_pool<float>(inputs, outputs);
    call.step = step_of(inputs, encoder);
    take_rows(inputs, {&call.q, &call.k, &call.v}, encoder);
    call.log_decay = inputs[kFirstInput + 3].data<float>();
    call.scale = scale_;
    call.H = inputs[0].shape(1);
    call.Dk = inputs[0].shape(2);
    call.Dv = inputs[0].shape(3);
    call.y = outputs[1].data<void>();
    encoder.dispatch([call] { run(call); });
  }

 private:
  float scale_;
};

}  // namespace

PoolAndRows lightning(const mx::array& pool, const StepArrays& step, const mx::array& q, const mx::array& k,
                      const mx::array& v, const mx::array& log_decay, float scale,
                      mx::StreamOrDevice stream) {
  require_step(pool, step);
  require_pool(pool, "[N, H, Dk, Dv]", 4);
  const int H = pool.shape(1), Dk = pool.shape(2), Dv = pool.shape(3);
  require_multiple("the head size of keys", Dk, 2);
  require_multiple("the head size of values", Dv, 16);
  require(q.ndim() == 3, "q must be [T, H, Dk], got " + shape_text(q));
  const int T = q.shape(0);
  require_shape("q", q, {T, H, Dk});
  require_shape("k", k, {T, H, Dk});
  require_shape("v", v, {T, H, Dv});
  require_shape("log_decay", log_decay, {H});
  const mx::Stream cpu = cpu_stream(stream);
  std::vector<mx::array> inputs{pool, step.segments, step.checkpoints, q, k, v, parameter(log_decay, cpu)};
  return make_node(std::make_shared<Lightning>(cpu, scale), std::move(inputs), v.shape(), v.dtype());
}

}  // namespace octavo
