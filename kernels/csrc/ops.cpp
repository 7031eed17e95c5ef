#include "ops.h"

#include "dispatch.h"
#include "ops_graph.h"
#include "primitive.h"

namespace octavo {
namespace {

void run_rms_norm(const void* x, const void* weight, void* y, Float type, Float weight_type, int rows,
                  int size, float eps) {
#if defined(__x86_64__)
  if (isa() >= Isa::avx512) return avx512::rms_norm(x, weight, y, type, weight_type, rows, size, eps);
  if (isa() == Isa::avx2) return avx2::rms_norm(x, weight, y, type, weight_type, rows, size, eps);
#endif
  generic::rms_norm(x, weight, y, type, weight_type, rows, size, eps);
}

void run_swiglu(const void* gate, const void* up, void* y, Float type, std::size_t count) {
#if defined(__x86_64__)
  if (isa() >= Isa::avx512) return avx512::swiglu(gate, up, y, type, count);
  if (isa() == Isa::avx2) return avx2::swiglu(gate, up, y, type, count);
#endif
  generic::swiglu(gate, up, y, type, count);
}

class RmsNorm : public CpuPrimitive {
 public:
  RmsNorm(mx::Stream stream, float eps) : CpuPrimitive(stream), eps_(eps) {}

  const char* name() const override { return "octavo.rms_norm"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const mx::array x = row_contiguous(inputs[0], encoder);
    const void* weight = nullptr;
    Float weight_type = Float::f32;
    if (inputs.size() > 1) {
      const mx::array plain = row_contiguous(inputs[1], encoder);
      weight = plain.data<void>();
      weight_type = float_of(plain.dtype());
    }
    allocate(outputs[0]);
    if (x.size() == 0) return;
    const int size = x.shape(-1), rows = static_cast<int>(x.size() / size);
    encoder.dispatch([x = x.data<void>(), weight, y = outputs[0].data<void>(), type = float_of(x.dtype()),
                      weight_type, rows, size,
                      eps = eps_] { run_rms_norm(x, weight, y, type, weight_type, rows, size, eps); });
  }

 private:
  float eps_;
};

class SwiGlu : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  const char* name() const override { return "octavo.swiglu"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const mx::array gate = row_contiguous(inputs[0], encoder), up = row_contiguous(inputs[1], encoder);
    allocate(outputs[0]);
    encoder.dispatch([gate = gate.data<void>(), up = up.data<void>(), y = outputs[0].data<void>(),
                      type = float_of(gate.dtype()),
                      count = gate.size()] { run_swiglu(gate, up, y, type, count); });
  }
};

}  // namespace

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps,
                   mx::StreamOrDevice stream) {
  require(x.ndim() >= 1 && is_float(x.dtype()),
          "x must be bfloat16, float16 or float32 with a last axis, got " + dtype_text(x.dtype()) + " " +
              shape_text(x));
  std::vector<mx::array> inputs{x};
  if (weight) {
    require(weight->ndim() == 1 && weight->shape(0) == x.shape(-1) && is_float(weight->dtype()),
            "weight must be floats [" + std::to_string(x.shape(-1)) + "] like the last axis of x, got " +
                dtype_text(weight->dtype()) + " " + shape_text(*weight));
    inputs.push_back(*weight);
  }
  return mx::array(x.shape(), x.dtype(), std::make_shared<RmsNorm>(cpu_stream(stream), eps),
                   std::move(inputs));
}

mx::array swiglu(const mx::array& gate, const mx::array& up, mx::StreamOrDevice stream) {
  require(gate.shape() == up.shape() && gate.dtype() == up.dtype() && is_float(gate.dtype()),
          "gate and up must be floats of one shape and type, got " + dtype_text(gate.dtype()) + " " +
              shape_text(gate) + " and " + dtype_text(up.dtype()) + " " + shape_text(up));
  return mx::array(gate.shape(), gate.dtype(), std::make_shared<SwiGlu>(cpu_stream(stream)), {gate, up});
}

}  // namespace octavo
