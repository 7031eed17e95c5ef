#include "recurrent/node.h"

namespace octavo {
namespace {

void run(const LruCall& call) { OCTAVO_AT_LEVEL(rg_lru, call); }

// pool, segments, checkpoints, x, input_gate, a_gate, c.
class RgLru : public RecurrentPrimitive {
 public:
  using RecurrentPrimitive::RecurrentPrimitive;

  const char* name() const override { return "octavo.rg_lru"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    LruCall call{};
    call.pool = take_pool<float>(inputs, outputs);
    call.step = step_of(inputs, encoder);
    take_rows(inputs, {&call.x, &call.input_gate, &call.a_gate}, encoder);
    call.c = inputs[kFirstInput + 3].data<float>();
    call.W = inputs[0].shape(1);
    call.y = outputs[1].data<void>();
    encoder.dispatch([call] { run(call); });
  }
};

}  // namespace

PoolAndRows rg_lru(const mx::array& pool, const StepArrays& step, const mx::array& x,
                   const mx::array& input_gate, const mx::array& a_gate, const mx::array& c,
                   mx::StreamOrDevice stream) {
  require_step(pool, step);
  require_pool(pool, "[N, W]", 2);
  const int W = pool.shape(1);
  require(x.ndim() == 2, "x must be [T, W], got " + shape_text(x));
  require_shape("x", x, {x.shape(0), W});
  require_shape("input_gate", input_gate, x.shape());
  require_shape("a_gate", a_gate, x.shape());
  require_shape("c", c, {W});
  const mx::Stream cpu = cpu_stream(stream);
  std::vector<mx::array> inputs{pool,       step.segments, step.checkpoints, x,
                                input_gate, a_gate,        parameter(c, cpu)};
  return make_node(std::make_shared<RgLru>(cpu), std::move(inputs), x.shape(), x.dtype());
}

}  // namespace octavo
