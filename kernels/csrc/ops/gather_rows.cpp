#include "ops/gather_rows.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ops/views.h"
#include "program/primitive.h"

namespace octavo {
namespace {

class SelectRows : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  const char* name() const override { return "octavo.select_rows"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    const mx::array x = row_contiguous(inputs[0], encoder), ids = row_contiguous(inputs[1], encoder);
    allocate(outputs[0]);
    const int num_rows = x.shape(0);
    const std::size_t row_bytes = x.nbytes() / num_rows;
    encoder.dispatch([from = x.data<char>(), ids = ids.data<int32_t>(), count = ids.size(),
                      to = outputs[0].data<char>(), num_rows, row_bytes] {
      for (std::size_t i = 0; i < count; ++i) {
        require(ids[i] >= -num_rows && ids[i] < num_rows,
                "row " + std::to_string(ids[i]) + " is outside the " + std::to_string(num_rows) + " rows");
        const std::size_t row = ids[i] < 0 ? ids[i] + num_rows : ids[i];
        std::memcpy(to + i * row_bytes, from + row * row_bytes, row_bytes);
      }
    });
  }
};

// Whether `input`, one of x's inputs, has as many rows as x.
bool has_rows_of(const mx::array& input, const mx::array& x) {
  return input.ndim() == x.ndim() && input.shape(0) == x.shape(0);
}

// Whether x is unevaluated, and each of its rows depends only on the same rows of its inputs.
bool computes_rows(const mx::array& x) {
  if (!is_pending(x) || x.ndim() < 2) return false;
  if (made_by(x, "Add") || made_by(x, "Multiply") || made_by(x, "AsType"))
    return std::all_of(x.inputs().begin(), x.inputs().end(),
                       [&](const mx::array& input) { return input.shape() == x.shape(); });
  const auto* const primitive = dynamic_cast<const CpuPrimitive*>(&x.primitive());
  return primitive != nullptr && primitive->computes_rows(x) && has_rows_of(x.inputs()[0], x);
}

// Whether all rows of x are equal, because x was broadcast.
bool repeats_row(const mx::array& x) {
  return made_by(x, "Broadcast") && (x.inputs()[0].ndim() < x.ndim() || x.inputs()[0].shape(0) == 1);
}

// Rebuilds an unevaluated graph so that it computes only some rows.
class RowGraph {
 public:
  RowGraph(const mx::array& x, mx::array ids, mx::StreamOrDevice stream)
      : ids_(std::move(ids)), stream_(stream) {
    find_shared(x);
  }

  mx::array rows_of(const mx::array& x) {
    if (const auto made = made_.find(x.id()); made != made_.end()) return made->second;
    if (repeats_row(x))
      return made_.emplace(x.id(), mx::broadcast_to(x.inputs()[0], shape_of(x), stream_)).first->second;
    if (shared_.count(x.id()) || !computes_rows(x))
      return made_.emplace(x.id(), select_rows(x, ids_, stream_)).first->second;
    return compute(x);
  }

 private:
  mx::array compute(const mx::array& x) {
    std::vector<mx::array> inputs;
    for (const mx::array& input : x.inputs())
      inputs.push_back(has_rows_of(input, x) ? rows_of(input) : input);
    const std::vector<mx::array> outputs = x.outputs();
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> types;
    for (const mx::array& output : outputs) {
      shapes.push_back(shape_of(output));
      types.push_back(output.dtype());
    }
    const auto results = mx::array::make_arrays(std::move(shapes), types, x.primitive_ptr(), inputs);
    for (std::size_t i = 0; i < outputs.size(); ++i) made_.emplace(outputs[i].id(), results[i]);
    return made_.at(x.id());
  }

  mx::Shape shape_of(const mx::array& x) const {
    mx::Shape shape = x.shape();
    shape[0] = ids_.shape(0);
    return shape;
  }

  // Finds arrays whose rows are all needed, because attention or another operation that mixes rows reads
  // them.
  void find_shared(const mx::array& x) {
    std::vector<mx::array> left{x}, whole;
    std::unordered_set<std::uintptr_t> seen;
    while (!left.empty()) {
      const mx::array node = left.back();
      left.pop_back();
      if (!seen.insert(node.id()).second || !is_pending(node)) continue;
      if (!computes_rows(node)) whole.push_back(node);
      else left.insert(left.end(), node.inputs().begin(), node.inputs().end());
    }
    while (!whole.empty()) {
      const mx::array node = whole.back();
      whole.pop_back();
      if (!is_pending(node) || !shared_.insert(node.id()).second) continue;
      for (const mx::array& sibling : node.siblings()) shared_.insert(sibling.id());
      whole.insert(whole.end(), node.inputs().begin(), node.inputs().end());
    }
  }

  mx::array ids_;
  mx::StreamOrDevice stream_;
  std::unordered_map<std::uintptr_t, mx::array> made_;
  std::unordered_set<std::uintptr_t> shared_;
};

}  // namespace

mx::array select_rows(const mx::array& x, const mx::array& ids, mx::StreamOrDevice stream) {
  require(x.ndim() >= 1 && x.size() > 0 && (x.itemsize() == 2 || x.itemsize() == 4),
          "x must have rows of 2-byte or 4-byte values, got " + array_text(x));
  require_integers("ids", ids);
  mx::Shape shape = ids.shape();
  shape.insert(shape.end(), x.shape().begin() + 1, x.shape().end());
  return mx::array(shape, x.dtype(), std::make_shared<SelectRows>(cpu_stream(stream)),
                   {x, mx::astype(ids, mx::int32, stream)});
}

mx::array compute_rows(const mx::array& x, const mx::array& ids, mx::StreamOrDevice stream) {
  if (ids.ndim() != 1 || x.ndim() < 2 || ids.size() >= std::size_t(x.shape(0)))
    return select_rows(x, ids, stream);
  return RowGraph(x, mx::astype(ids, mx::int32, stream), stream).rows_of(x);
}

}  // namespace octavo
