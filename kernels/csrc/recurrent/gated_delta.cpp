#include "recurrent/node.h"

namespace octavo {
namespace {

void run(const DeltaCall& call) { OCTAVO_AT_LEVEL(gated_delta, call); }

struct DeltaOptions {
  Gates gates;
  float lower_bound, beta_scale;
};

// pool, segments, checkpoints, q, k, v, a, b, and A_log and dt_bias unless the gates are ready.
class GatedDelta : public RecurrentPrimitive {
 public:
  GatedDelta(mx::Stream stream, DeltaOptions options) : RecurrentPrimitive(stream), options_(options) {}

  const char* name() const override { return "octavo.gated_delta"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    DeltaCall call{};
    call.pool = take_pool<float>(inputs, outputs);
    call.step = step_of(inputs, encoder);
    take_rows(inputs, {&call.q, &call.k, &call.v, &call.a, &call.b}, encoder);
    const mx::array &q = inputs[kFirstInput], &a = inputs[kFirstInput + 3];
    call.Hk = q.shape(1);
    call.Hv = inputs[0].shape(1);
    call.Dv = inputs[0].shape(2);
    call.Dk = inputs[0].shape(3);
    call.vector_gate = a.ndim() == 3;
    call.gates = options_.gates;
    call.lower_bound = options_.lower_bound;
    call.beta_scale = options_.beta_scale;
    if (call.gates != Gates::ready) {
      call.A_log = inputs[kFirstInput + 5].data<float>();
      call.wide_A = static_cast<int>(inputs[kFirstInput + 5].size()) != call.Hv;
      call.dt_bias = inputs[kFirstInput + 6].data<float>();
    }
    call.y = outputs[1].data<void>();
    encoder.dispatch([call] { run(call); });
  }

 private:
  DeltaOptions options_;
};

Gates gates_named(const std::string& name) {
  if (name == "ready") return Gates::ready;
  if (name == "softplus") return Gates::softplus;
  require(name == "bounded", "gates must be ready, softplus or bounded, got \"" + name + "\"");
  return Gates::bounded;
}

void require_delta(const mx::array& pool, const mx::array& q, const mx::array& k, const mx::array& v,
                   const mx::array& a, const mx::array& b) {
  require_pool(pool, "[N, Hv, Dv, Dk]", 4);
  const int Hv = pool.shape(1), Dv = pool.shape(2), Dk = pool.shape(3);
  require(Dk % 16 == 0 && Dk <= 256,
          "the head size of keys must be a multiple of 16, at most 256, got " + std::to_string(Dk));
  require(q.ndim() == 3 && q.shape(1) > 0 && Hv % q.shape(1) == 0,
          "q must be [T, Hk, Dk] with Hk a divisor of the " + std::to_string(Hv) + " heads of v, got " +
              shape_text(q));
  const int T = q.shape(0);
  require_shape("q", q, {T, q.shape(1), Dk});
  require_shape("k", k, {T, q.shape(1), Dk});
  require_shape("v", v, {T, Hv, Dv});
  if (a.ndim() == 3) require_shape("a", a, {T, Hv, Dk});
  else require_shape("a", a, {T, Hv});
  require_shape("b", b, {T, Hv});
}

}  // namespace

PoolAndRows gated_delta(const mx::array& pool, const StepArrays& step, const mx::array& q, const mx::array& k,
                        const mx::array& v, const mx::array& a, const mx::array& b, const DeltaGates& gates,
                        mx::StreamOrDevice stream) {
  require_step(pool, step);
  require_delta(pool, q, k, v, a, b);
  const mx::Stream cpu = cpu_stream(stream);
  const DeltaOptions options{gates_named(gates.kind), gates.lower_bound, gates.beta_scale};
  std::vector<mx::array> inputs{pool, step.segments, step.checkpoints, q, k, v, a, b};
  if (options.gates != Gates::ready) {
    require(gates.A_log && gates.dt_bias, "gates of " + gates.kind + " need A_log and dt_bias");
    const std::size_t heads = pool.shape(1), of_row = a.size() / std::max<std::size_t>(a.shape(0), 1);
    const std::size_t num_A = gates.A_log->size(), num_bias = gates.dt_bias->size();
    require(num_A == heads || (a.ndim() == 3 && num_A == heads * pool.shape(3)),
            "A_log must have a value for each head, or for each value of a row of a, got " +
                shape_text(*gates.A_log));
    require(a.shape(0) == 0 || num_bias == of_row,
            "dt_bias must have the values of a row of a, got " + shape_text(*gates.dt_bias));
    inputs.push_back(parameter(*gates.A_log, cpu));
    inputs.push_back(parameter(*gates.dt_bias, cpu));
  }
  return make_node(std::make_shared<GatedDelta>(cpu, options), std::move(inputs), v.shape(), v.dtype());
}

}  // namespace octavo
