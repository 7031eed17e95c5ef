#include "linear/experts.h"

#include <cstring>

#include "linear/kernels.h"
#include "ops/views.h"
#include "program/primitive.h"
#include "runtime/threads.h"

namespace octavo {
namespace {

constexpr int kScratchSlot = 3;  // thread_scratch slot; the linear kernels use others

// Rows sorted by expert: expert e has order[starts[e]] to order[starts[e + 1] - 1], ascending.
struct Groups {
  std::vector<int> starts, order;
};

// Sorts blocks of `block_rows` rows by expert, in a stable way (counting sort).
Groups group_rows(const int32_t* ids, int count, int block_rows, int num_experts) {
  Groups groups{std::vector<int>(num_experts + 1, 0),
                std::vector<int>(static_cast<std::size_t>(count) * block_rows)};
  for (int i = 0; i < count; ++i) {
    require(ids[i] >= 0 && ids[i] < num_experts, "expert " + std::to_string(ids[i]) + " is outside the " +
                                                     std::to_string(num_experts) + " experts");
    groups.starts[ids[i] + 1] += block_rows;
  }
  for (int e = 0; e < num_experts; ++e) groups.starts[e + 1] += groups.starts[e];
  std::vector<int> next(groups.starts.begin(), groups.starts.end() - 1);
  for (int i = 0; i < count; ++i)
    for (int m = 0; m < block_rows; ++m) groups.order[next[ids[i]]++] = i * block_rows + m;
  return groups;
}

class GatherLinear : public CpuPrimitive {
 public:
  GatherLinear(mx::Stream stream, Experts experts, bool exact)
      : CpuPrimitive(stream), experts_(std::move(experts)), exact_(exact) {}

  const char* name() const override { return "octavo.gather_linear"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    // A broadcast x is not copied; its rows are addressed by strides.
    const bool whole_rows = inputs[0].strides(-1) == 1;
    const mx::array x = whole_rows ? inputs[0] : row_contiguous(inputs[0], encoder);
    const mx::array ids = row_contiguous(inputs[1], encoder);
    mx::array& y = outputs[0];
    allocate(y);
    if (y.size() == 0) return;
    std::vector<std::size_t> offsets(y.size() / y.shape(-1));
    for (std::size_t row = 0; row < offsets.size(); ++row) offsets[row] = row_offset(x, row);
    const LinearCall call{
        nullptr, x.data<void>(), y.data<void>(), nullptr, float_of(x.dtype()), float_of(y.dtype()),
        0,       exact_};
    encoder.dispatch([call, experts = experts_, offsets = std::move(offsets), ids = ids.data<int32_t>(),
                      count = static_cast<int>(ids.size()), block_rows = y.shape(-2)] {
      const int num_experts = static_cast<int>(experts->weights.size());
      const Groups groups = group_rows(ids, count, block_rows, num_experts);
      for (int e = 0; e < num_experts; ++e) {
        const int start = groups.starts[e], rows = groups.starts[e + 1] - start;
        if (rows > 0) run_expert(call, *experts->weights[e], groups.order.data() + start, rows, offsets);
      }
    });
  }

 private:
  // Computes y[r] for the rows r of one expert: gathers the rows, multiplies all of them in one call, and
  // scatters results.
  static void run_expert(LinearCall call, const PackedWeight& weight, const int* order, int rows,
                         const std::vector<std::size_t>& offsets) {
    const std::size_t x_size = float_size(call.x_type), y_size = float_size(call.y_type);
    const std::size_t x_bytes = x_size * weight.shape.inputs, y_bytes = y_size * weight.shape.outputs;
    const uint8_t* x = static_cast<const uint8_t*>(call.x);
    uint8_t* y = static_cast<uint8_t*>(call.y);
    call.weight = &weight;
    call.rows = rows;
    if (rows == 1) {
      call.x = x + x_size * offsets[order[0]];
      call.y = y + y_bytes * order[0];
      return run_linear(call);
    }
    const std::size_t gathered = (x_bytes * rows + 63) / 64 * 64;
    uint8_t* scratch = static_cast<uint8_t*>(thread_scratch(gathered + y_bytes * rows, kScratchSlot));
    parallel_for(rows,
                 [&](int i) { std::memcpy(scratch + x_bytes * i, x + x_size * offsets[order[i]], x_bytes); });
    call.x = scratch;
    call.y = scratch + gathered;
    run_linear(call);
    parallel_for(
        rows, [&](int i) { std::memcpy(y + y_bytes * order[i], scratch + gathered + y_bytes * i, y_bytes); });
  }

  Experts experts_;
  bool exact_;
};

}  // namespace

PackedExperts::PackedExperts(std::vector<Packed> experts) : weights(std::move(experts)) {
  require(!weights.empty(), "experts must not be empty");
  for (const Packed& weight : weights)
    require(weight != nullptr && weight->shape == weights.front()->shape,
            "all experts must have the same shape and format");
}

std::size_t PackedExperts::nbytes() const {
  std::size_t bytes = 0;
  for (const Packed& weight : weights) bytes += weight->num_bytes();
  return bytes;
}

std::size_t PackedExperts::unread_nbytes() const {
  std::size_t bytes = 0;
  for (const Packed& weight : weights) bytes += weight->num_unread_bytes();
  return bytes;
}

mx::array gather_linear(const mx::array& x, const Experts& experts, const mx::array& ids, bool exact,
                        mx::StreamOrDevice stream) {
  const PackedShape& packed = experts->shape();
  require_floats("x", x, x.ndim() >= 2 && x.shape(-1) == packed.inputs,
                 "[..., M, " + std::to_string(packed.inputs) + "] for experts [" +
                     std::to_string(packed.outputs) + ", " + std::to_string(packed.inputs) + "]");
  require_integers("ids", ids);
  const mx::Shape leading(x.shape().begin(), x.shape().end() - 2);
  const mx::Shape batch = mx::broadcast_shapes(leading, ids.shape());
  mx::Shape wide = batch, shape = batch;
  wide.insert(wide.end(), {x.shape(-2), packed.inputs});
  shape.insert(shape.end(), {x.shape(-2), packed.outputs});
  const mx::array wide_ids = mx::broadcast_to(narrow_ids(ids, stream), batch, stream);
  return mx::array(shape, result_dtype(x, *experts->weights.front()),
                   std::make_shared<GatherLinear>(cpu_stream(stream), experts, exact),
                   {mx::broadcast_to(x, wide, stream), wide_ids});
}

}  // namespace octavo
