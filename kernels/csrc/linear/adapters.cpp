#include "linear/adapters.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "ops/views.h"
#include "program/primitive.h"
#include "runtime/dispatch.h"
#include "runtime/threads.h"

namespace octavo {
namespace {

constexpr int kLanes = 16;       // values per vector
constexpr int kScratchSlot = 2;  // thread_scratch slot; the kernel's tasks use slot 0

int whole_vectors(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Copies a matrix, with rows padded with zeros to `stride` values.
Lines laid_out(const mx::array& from, int stride) {
  const std::size_t rows = from.size() / from.shape(-1), size = from.itemsize();
  const std::size_t row_bytes = from.shape(-1) * size;
  Lines to = allocate_lines(rows * stride * size);
  for (std::size_t row = 0; row < rows; ++row) {
    char* const at = to.get() + row * stride * size;
    std::memcpy(at, from.data<char>() + row * row_bytes, row_bytes);
    std::memset(at + row_bytes, 0, stride * size - row_bytes);
  }
  return to;
}

std::vector<float> floats(const std::optional<mx::array>& values, int count, const char* name) {
  if (!values) return {};
  require(values->ndim() == 1 && values->shape(0) == count,
          std::string(name) + " must have shape [" + std::to_string(count) + "] like the outputs, got " +
              shape_text(*values));
  mx::array plain = mx::contiguous(mx::astype(*values, mx::float32));
  plain.eval();
  return {plain.data<float>(), plain.data<float>() + count};
}

// Rows sorted by slot and expert, and divided into groups that share an adapter, expert and part.
class Groups {
 public:
  Groups(const AdapterTable& table, const int32_t* places, int count, int rows_per_place) {
    const int experts = table.experts();
    std::vector<int> ids;
    for (int i = 0; i < count; ++i) {
      require(places[i] >= 0 && places[i] < (table.num_slots() + 1) * experts,
              "slots must be between 0 and " + std::to_string(table.num_slots()) + ", got " +
                  std::to_string(places[i] / experts));
      if (places[i] >= experts) ids.push_back(i);
    }
    std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return places[a] < places[b]; });
    for (const int id : ids)
      for (int m = 0; m < rows_per_place; ++m) order.push_back(id * rows_per_place + m);
    const auto place_of = [&](std::size_t row) { return places[order[row] / rows_per_place]; };
    for (std::size_t first = 0; first < order.size();) {
      std::size_t end = first + 1;
      while (end < order.size() && end - first < kAdapterGroupRows && place_of(end) == place_of(first)) ++end;
      add(table, place_of(first), static_cast<int>(first), static_cast<int>(end - first));
      first = end;
    }
  }

  std::vector<int> order;
  std::vector<AdapterGroup> groups;
  std::size_t z_size = 0;

 private:
  void add(const AdapterTable& table, int place, int first, int count) {
    int offset = 0;
    for (std::size_t part = 0; part < table.outputs().size(); offset += table.outputs()[part++])
      if (const AdapterFactors* const factors = table.at(place / table.experts(), part)) {
        groups.push_back({factors, place % table.experts(), offset, first, count, z_size});
        z_size += static_cast<std::size_t>(factors->rank) * count;
      }
  }
};

// Lets the output share y's buffer, which no other operation reads.
void take_over(const mx::array& y, mx::array& output, Encoder& encoder) {
  if (y.flags().row_contiguous && y.is_donatable()) {
    output.copy_shared_buffer(y);
    return;
  }
  const mx::array plain = row_contiguous(y, encoder);
  allocate(output);
  encoder.dispatch([from = plain.data<char>(), to = output.data<char>(), bytes = output.nbytes()] {
    std::memcpy(to, from, bytes);
  });
}

class AddAdapters : public CpuPrimitive {
 public:
  AddAdapters(mx::Stream stream, std::shared_ptr<AdapterTable> table, bool experts)
      : CpuPrimitive(stream), table_(std::move(table)), experts_(experts) {}

  const char* name() const override {
    return experts_ ? "octavo.add_expert_adapters" : "octavo.add_adapters";
  }
  bool computes_rows(const mx::array& y) const override {
    const auto& inputs = y.inputs();
    return std::all_of(inputs.begin(), inputs.end(), [&](const mx::array& input) {
      return input.ndim() == y.ndim() && input.shape(0) == y.shape(0);
    });
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    mx::array& y = outputs[0];
    take_over(inputs[0], y, encoder);
    if (y.size() == 0) return;
    const bool whole_rows = inputs[1].strides(-1) == 1;
    const mx::array x = whole_rows ? inputs[1] : row_contiguous(inputs[1], encoder);
    const mx::array places = row_contiguous(inputs[2], encoder);
    std::vector<std::size_t> offsets;
    if (!x.flags().row_contiguous) {
      offsets.resize(y.size() / y.shape(-1));
      for (std::size_t row = 0; row < offsets.size(); ++row) offsets[row] = row_offset(x, row);
    }
    AdapterCall call{};
    call.x = x.data<void>();
    call.x_type = float_of(x.dtype());
    call.y = y.data<void>();
    call.y_type = float_of(y.dtype());
    call.inputs = table_->inputs();
    call.y_stride = y.shape(-1);
    const int count = static_cast<int>(places.size());
    const int rows_per_place = static_cast<int>(y.size() / y.shape(-1)) / count;
    encoder.dispatch([call, table = table_, offsets = std::move(offsets), places = places.data<int32_t>(),
                      count, rows_per_place]() mutable {
      const Groups found(*table, places, count, rows_per_place);
      if (found.groups.empty()) return;
      call.x_offsets = offsets.empty() ? nullptr : offsets.data();
      call.order = found.order.data();
      call.groups = found.groups.data();
      call.num_groups = static_cast<int>(found.groups.size());
      call.z = static_cast<float*>(thread_scratch(sizeof(float) * found.z_size, kScratchSlot));
      OCTAVO_AT_LEVEL(add_groups, call);
    });
  }

 private:
  std::shared_ptr<AdapterTable> table_;
  bool experts_;
};

void check_rows(const mx::array& y, const mx::array& x, const AdapterTable& table) {
  require(is_float(x.dtype()) && is_float(y.dtype()) && x.ndim() >= 1 && x.shape(-1) == table.inputs() &&
              y.ndim() >= 1 && y.shape(-1) == table.total_outputs(),
          "x and y must be floats [..., " + std::to_string(table.inputs()) + "] and [..., " +
              std::to_string(table.total_outputs()) + "], got " + dtype_text(x.dtype()) + " " +
              shape_text(x) + " and " + dtype_text(y.dtype()) + " " + shape_text(y));
}

}  // namespace

Factors make_factors(const mx::array& a, const mx::array& b, float scale,
                     const std::optional<mx::array>& gain, const std::optional<mx::array>& bias) {
  require(a.ndim() == 3 && b.ndim() == 3 && a.size() > 0 && b.size() > 0 && a.shape(0) == b.shape(0) &&
              a.shape(1) == b.shape(1),
          "a and b must have shapes [experts, rank, inputs] and [experts, rank, outputs], got " +
              shape_text(a) + " and " + shape_text(b));
  require(a.dtype() == b.dtype() && (a.dtype() == mx::bfloat16 || a.dtype() == mx::float32),
          "a and b must both be bfloat16 or float32, got " + dtype_text(a.dtype()) + " and " +
              dtype_text(b.dtype()));
  mx::array plain_a = mx::contiguous(a), plain_b = mx::contiguous(b);
  mx::eval({plain_a, plain_b});
  const int a_stride = whole_vectors(a.shape(2)), b_stride = whole_vectors(b.shape(2));
  return std::make_shared<AdapterFactors>(
      AdapterFactors{a.shape(0), a.shape(1), a.shape(2), b.shape(2), a_stride, b_stride, float_of(a.dtype()),
                     scale, laid_out(plain_a, a_stride), laid_out(plain_b, b_stride),
                     floats(gain, b.shape(2), "gain"), floats(bias, b.shape(2), "bias")});
}

std::size_t AdapterFactors::num_bytes() const {
  const std::size_t values = static_cast<std::size_t>(experts) * rank * (a_stride + b_stride);
  return values * float_size(type) + sizeof(float) * (gain.size() + bias.size());
}

AdapterTable::AdapterTable(int inputs, std::vector<int> outputs, int experts, int num_slots)
    : inputs_(inputs), experts_(experts), num_slots_(num_slots), outputs_(std::move(outputs)) {
  require(inputs_ > 0 && experts_ > 0 && num_slots_ > 0 && !outputs_.empty() &&
              *std::min_element(outputs_.begin(), outputs_.end()) > 0,
          "inputs, outputs, experts and num_slots must be at least 1");
  require(experts_ == 1 || outputs_.size() == 1, "experts must belong to one layer, got several layers");
  factors_.resize((num_slots_ + std::size_t{1}) * outputs_.size());
}

int AdapterTable::total_outputs() const { return std::accumulate(outputs_.begin(), outputs_.end(), 0); }

const AdapterFactors* AdapterTable::at(int slot, std::size_t part) const {
  return factors_[slot * outputs_.size() + part].get();
}

void AdapterTable::put(int slot, int part, Factors factors) {
  const int parts = static_cast<int>(outputs_.size());
  require(slot >= 1 && slot <= num_slots_ && part >= 0 && part < parts,
          "slot must be between 1 and " + std::to_string(num_slots_) + " and part below " +
              std::to_string(parts) + ", got " + std::to_string(slot) + " and " + std::to_string(part));
  require(factors && factors->inputs == inputs_ && factors->outputs == outputs_[part] &&
              factors->experts == experts_,
          "factors must be of " + std::to_string(experts_) + " matrices [" + std::to_string(outputs_[part]) +
              ", " + std::to_string(inputs_) + "]");
  factors_[slot * outputs_.size() + part] = std::move(factors);
}

void AdapterTable::clear(int slot) {
  require(slot >= 1 && slot <= num_slots_,
          "slot must be between 1 and " + std::to_string(num_slots_) + ", got " + std::to_string(slot));
  std::fill_n(factors_.begin() + slot * outputs_.size(), outputs_.size(), nullptr);
}

mx::array add_adapters(const mx::array& y, const mx::array& x, const mx::array& slots,
                       const std::shared_ptr<AdapterTable>& table, mx::StreamOrDevice stream) {
  check_rows(y, x, *table);
  const std::size_t rows = y.size() / y.shape(-1);
  require(table->experts() == 1 && slots.dtype() == mx::int32 && slots.size() > 0 &&
              rows % slots.size() == 0 && x.size() / x.shape(-1) == rows,
          "slots must be int32, one for each row or run of rows of x and y, got " +
              dtype_text(slots.dtype()) + " " + shape_text(slots) + " for x " + shape_text(x) + " and y " +
              shape_text(y));
  return mx::array(y.shape(), y.dtype(), std::make_shared<AddAdapters>(cpu_stream(stream), table, false),
                   {y, x, slots});
}

mx::array add_expert_adapters(const mx::array& y, const mx::array& x, const mx::array& places,
                              const std::shared_ptr<AdapterTable>& table, mx::StreamOrDevice stream) {
  check_rows(y, x, *table);
  const mx::Shape batch(y.shape().begin(), y.shape().end() - 2);
  mx::Shape wide = batch;
  wide.insert(wide.end(), {y.shape(-2), x.shape(-1)});
  return mx::array(
      y.shape(), y.dtype(), std::make_shared<AddAdapters>(cpu_stream(stream), table, true),
      {y, mx::broadcast_to(x, wide, stream), mx::broadcast_to(narrow_ids(places, stream), batch, stream)});
}

}  // namespace octavo
