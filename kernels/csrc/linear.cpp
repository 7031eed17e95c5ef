#include "linear.h"

#include "linear_kernels.h"
#include "primitive.h"
#include "threads.h"

namespace octavo {
namespace {

class Linear : public CpuPrimitive {
 public:
  Linear(mx::Stream stream, Packed weight, bool exact)
      : CpuPrimitive(stream), weight_(std::move(weight)), exact_(exact) {}

  const char* name() const override { return "octavo.linear"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    const mx::array x = row_contiguous(inputs[0], encoder);
    mx::array& y = outputs[0];
    allocate(y);
    const void* residual = inputs.size() > 1 ? row_contiguous(inputs[1], encoder).data<void>() : nullptr;
    if (y.size() == 0) return;
    const int rows = static_cast<int>(y.size() / weight_->shape.outputs);
    const LinearCall call{weight_.get(),       x.data<void>(),      y.data<void>(), residual,
                          float_of(x.dtype()), float_of(y.dtype()), rows,           exact_};
    encoder.dispatch([call, keep = weight_] { run_linear(call); });
  }

 private:
  Packed weight_;
  bool exact_;
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

mx::array ready(const mx::array& a) {
  mx::array plain = mx::contiguous(a);
  plain.eval();
  return plain;
}

void set_bias(PackedWeight& weight, const std::optional<mx::array>& bias) {
  if (!bias) return;
  const int outputs = weight.shape.outputs;
  require(bias->ndim() == 1 && bias->shape(0) == outputs, "bias must have shape [" + std::to_string(outputs) +
                                                              "] like the weight's rows, got " +
                                                              shape_text(*bias));
  const mx::array values = ready(mx::astype(*bias, mx::float32));
  weight.bias.assign(static_cast<std::size_t>(weight.shape.num_panels()) * kPanel, 0.0f);
  std::copy_n(values.data<float>(), outputs, weight.bias.begin());
}

WeightKind dense_kind(mx::Dtype type) {
  return type == mx::bfloat16 ? WeightKind::bf16 : type == mx::float16 ? WeightKind::f16 : WeightKind::f32;
}

// The number of inputs of codes [outputs, words].
int check_codes(const mx::array& codes, int group, int bits) {
  require(
      codes.ndim() == 2 && codes.size() > 0 && codes.dtype() == mx::uint32,
      "codes must be uint32 [outputs, words], got " + dtype_text(codes.dtype()) + " " + shape_text(codes));
  const int64_t stream = int64_t{32} * codes.shape(1);
  require(stream % (bits * group) == 0, "codes " + shape_text(codes) + " are not whole groups of " +
                                            std::to_string(group) + " codes of " + std::to_string(bits) +
                                            " bits per row");
  return static_cast<int>(stream / bits);
}

void check_scales(const char* name, const mx::array& scales, const mx::array& codes, int inputs, int group) {
  const mx::Shape wanted{codes.shape(0), inputs / group};
  require(scales.shape() == wanted, std::string(name) +
                                        " must have shape [outputs, inputs / group_size] = [" +
                                        std::to_string(wanted[0]) + ", " + std::to_string(wanted[1]) +
                                        "] for codes " + shape_text(codes) + ", got " + shape_text(scales));
}

Packed pack_quantized(const PackedShape& shape, const mx::array& codes, const mx::array& scales,
                      const mx::array* biases, const std::optional<mx::array>& bias) {
  const mx::array q = ready(codes), s = ready(scales), b = biases != nullptr ? ready(*biases) : s;
  auto packed = std::make_shared<PackedWeight>(shape, q.data<uint32_t>(), s.data<void>(), b.data<void>());
  set_bias(*packed, bias);
  return packed;
}

}  // namespace

Packed pack_dense(const mx::array& weight, const std::optional<mx::array>& bias) {
  require(weight.ndim() == 2 && weight.size() > 0,
          "weight must have shape [outputs, inputs], neither of them 0, got " + shape_text(weight));
  require(is_float(weight.dtype()),
          "weight must be bfloat16, float16 or float32, got " + dtype_text(weight.dtype()));
  const mx::array plain = ready(weight);
  const PackedShape shape{dense_kind(plain.dtype()), float_of(plain.dtype()), plain.shape(0), plain.shape(1)};
  auto packed = std::make_shared<PackedWeight>(shape, plain.data<void>());
  set_bias(*packed, bias);
  return packed;
}

Packed pack_affine(const mx::array& codes, const mx::array& scales, const mx::array& biases, int group_size,
                   int bits, const std::optional<mx::array>& bias) {
  require((bits >= 1 && bits <= 6) || bits == 8, "bits must be 1 to 6 or 8, got " + std::to_string(bits));
  require(group_size == 32 || group_size == 64 || group_size == 128,
          "group_size must be 32, 64 or 128, got " + std::to_string(group_size));
  const int inputs = check_codes(codes, group_size, bits);
  check_scales("scales", scales, codes, inputs, group_size);
  check_scales("biases", biases, codes, inputs, group_size);
  require(is_float(scales.dtype()) && scales.dtype() == biases.dtype(),
          "scales and biases must share a type out of bfloat16, float16 and float32, got " +
              dtype_text(scales.dtype()) + " and " + dtype_text(biases.dtype()));
  const PackedShape shape{
      WeightKind::affine, float_of(scales.dtype()), codes.shape(0), inputs, group_size, bits};
  return pack_quantized(shape, codes, scales, &biases, bias);
}

Packed pack_fp4(const mx::array& codes, const mx::array& scales, const std::string& mode,
                const std::optional<mx::array>& bias) {
  require(mode == "mxfp4" || mode == "nvfp4", "mode must be mxfp4 or nvfp4, got " + mode);
  const WeightKind kind = mode == "mxfp4" ? WeightKind::mxfp4 : WeightKind::nvfp4;
  const int group = kind == WeightKind::mxfp4 ? 32 : 16;
  const int inputs = check_codes(codes, group, 4);
  check_scales("scales", scales, codes, inputs, group);
  require(scales.dtype() == mx::uint8,
          "scales of " + mode + " must be uint8, got " + dtype_text(scales.dtype()));
  const PackedShape shape{kind, Float::bf16, codes.shape(0), inputs, group, 4};
  return pack_quantized(shape, codes, scales, nullptr, bias);
}

std::vector<mx::array> unpack(const Packed& weight) {
  const PackedShape& shape = weight->shape;
  const auto empty = [](mx::Shape dims, mx::Dtype type) {
    mx::array a(std::move(dims), type, nullptr, {});
    allocate(a);
    a.set_status(mx::array::Status::available);
    return a;
  };
  const mx::Dtype type = packed_dtype(*weight);
  if (!shape.quantized()) {
    mx::array dense = empty({shape.outputs, shape.inputs}, type);
    weight->unpack_dense(dense.data<void>());
    return {dense};
  }
  mx::array codes = empty({shape.outputs, shape.inputs * shape.bits / 32}, mx::uint32);
  const mx::Shape groups{shape.outputs, shape.num_groups()};
  mx::array scales = empty(groups, shape.affine() ? type : mx::uint8);
  if (!shape.affine()) {
    weight->unpack_quantized(codes.data<uint32_t>(), scales.data<void>(), nullptr);
    return {codes, scales};
  }
  mx::array biases = empty(groups, type);
  weight->unpack_quantized(codes.data<uint32_t>(), scales.data<void>(), biases.data<void>());
  return {codes, scales, biases};
}

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
  require(x.ndim() >= 1 && x.shape(-1) == packed.inputs,
          "x must have shape [..., " + std::to_string(packed.inputs) + "] for a weight [" +
              std::to_string(packed.outputs) + ", " + std::to_string(packed.inputs) + "], got " +
              shape_text(x));
  require(is_float(x.dtype()), "x must be bfloat16, float16 or float32, got " + dtype_text(x.dtype()));
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
                dtype_text(residual->dtype()) + " " + shape_text(*residual) + " for x " + shape_text(x));
    inputs.push_back(*residual);
  }
  return mx::array(shape, type, std::make_shared<Linear>(cpu_stream(stream), weight, exact),
                   std::move(inputs));
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
  require(mx::issubdtype(ids.dtype(), mx::integer), "ids must be integers, got " + dtype_text(ids.dtype()));
  mx::Shape shape = ids.shape();
  shape.push_back(weight->shape.inputs);
  return mx::array(shape, packed_dtype(*weight), std::make_shared<TakeRows>(cpu_stream(stream), weight),
                   {mx::astype(ids, mx::int32, stream)});
}

}  // namespace octavo
