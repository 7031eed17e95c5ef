#include "recurrent/node.h"

namespace octavo {
namespace {

void run(const ScanCall& call) { OCTAVO_AT_LEVEL(selective_scan, call); }

// pool, segments, checkpoints, x, d, B, C, A, D.
class SelectiveScan : public RecurrentPrimitive {
 public:
  using RecurrentPrimitive::RecurrentPrimitive;

  const char* name() const override { return "octavo.selective_scan"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    ScanCall call{};
    call.pool = take_pool<float>(inputs, outputs);
    call.step = step_of(inputs, encoder);
    take_rows(inputs, {&call.x, &call.d, &call.B, &call.C}, encoder);
    call.A = inputs[kFirstInput + 4].data<float>();
    call.D = inputs[kFirstInput + 5].data<float>();
    call.W = inputs[0].shape(1);
    call.Ds = inputs[0].shape(2);
    call.y = outputs[1].data<void>();
    encoder.dispatch([call] { run(call); });
  }
};

}  // namespace

PoolAndRows selective_scan(const mx::array& pool, const StepArrays& step, const mx::array& x,
                           const mx::array& d, const mx::array& B, const mx::array& C, const mx::array& A,
                           const mx::array& D, mx::StreamOrDevice stream) {
  require_step(pool, step);
  require_pool(pool, "[N, W, Ds]", 3);
  const int W = pool.shape(1), Ds = pool.shape(2);
  require_multiple("the state's size", Ds, 16);
  require(x.ndim() == 2, "x must be [T, W], got " + shape_text(x));
  const int T = x.shape(0);
  require_shape("x", x, {T, W});
  require_shape("d", d, {T, W});
  require_shape("B", B, {T, Ds});
  require_shape("C", C, {T, Ds});
  require_shape("A", A, {W, Ds});
  require_shape("D", D, {W});
  const mx::Stream cpu = cpu_stream(stream);
  std::vector<mx::array> inputs{pool, step.segments,     step.checkpoints, x, d, B,
                                C,    parameter(A, cpu), parameter(D, cpu)};
  return make_node(std::make_shared<SelectiveScan>(cpu), std::move(inputs), x.shape(), x.dtype());
}

}  // namespace octavo
