#include "recurrent/node.h"

namespace octavo {
namespace {

void run(const WkvCall& call) { OCTAVO_AT_LEVEL(wkv7, call); }

// pool, segments, checkpoints, r, w, k, v, a, b.
class Wkv7 : public RecurrentPrimitive {
 public:
  using RecurrentPrimitive::RecurrentPrimitive;

  const char* name() const override { return "octavo.wkv7"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    WkvCall call{};
    call.pool = take_pool<float>(inputs, outputs);
    call.step = step_of(inputs, encoder);
    take_rows(inputs, {&call.r, &call.w, &call.k, &call.v, &call.a, &call.b}, encoder);
    call.H = inputs[0].shape(1);
    call.D = inputs[0].shape(2);
    call.y = outputs[1].data<void>();
    encoder.dispatch([call] { run(call); });
  }
};

}  // namespace

PoolAndRows wkv7(const mx::array& pool, const StepArrays& step, const mx::array& r, const mx::array& w,
                 const mx::array& k, const mx::array& v, const mx::array& a, const mx::array& b,
                 mx::StreamOrDevice stream) {
  require_step(pool, step);
  require_pool(pool, "[N, H, D, D]", 4);
  const int H = pool.shape(1), D = pool.shape(2);
  require(pool.shape(3) == D, "pool must be [N, H, D, D], got " + shape_text(pool));
  require_multiple("the head size", D, 16);
  require(r.ndim() == 3, "r must be [T, H, D], got " + shape_text(r));
  const mx::Shape shape{r.shape(0), H, D};
  require_shape("r", r, shape);
  require_shape("w", w, shape);
  require_shape("k", k, shape);
  require_shape("v", v, shape);
  require_shape("a", a, shape);
  require_shape("b", b, shape);
  return make_node(std::make_shared<Wkv7>(cpu_stream(stream)),
                   {pool, step.segments, step.checkpoints, r, w, k, v, a, b}, shape, r.dtype());
}

}  // namespace octavo
