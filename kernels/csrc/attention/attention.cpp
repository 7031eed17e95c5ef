// The MLX primitive of paged attention, and the bindings of attention and pages.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attention/plan.h"
#include "attention/primitives.h"
#include "mlx/primitives.h"
#include "pages/pages.h"
#include "pages/pool_memory.h"
#include "program/encoder.h"
#include "runtime/threads.h"

namespace nb = nanobind;

namespace octavo {
namespace {

// Partial results: of split items, and of one pool for rows of another. Kept between calls, because every
// layer of a step needs the same amount; given back once a call needs far less.
float* partial_buffer(int64_t size) {
  static thread_local std::vector<float> buffer;
  constexpr size_t kKeep = size_t(1) << 20;
  const size_t wanted = size_t(size);
  if (buffer.size() < wanted || (buffer.size() > kKeep && buffer.size() / 8 > wanted))
    std::vector<float>(wanted).swap(buffer);
  return buffer.data();
}

}  // namespace

void attend_latents(AttendArgs& args, const RowsView& rotary_queries) {
  const PageLayout stored = args.layout;
  args.rotary = {stored.v, stored.v_codes, stored.v_scales, rotary_queries};
  args.layout.v = stored.k;
  args.layout.v_codes = 0;
  args.layout.v_scales = stored.k_scales;
}

namespace {

constexpr int kPartSlot = 1;  // of thread_scratch: kernels use the first

int num_tokens(const AttendArgs& args) { return args.q_start[args.num_sequences]; }

// A call, its kernel, and how it is cut into items.
struct PlannedCall {
  AttendArgs args;
  AttendKernel kernel;
  AttendPlan plan;
  float* partials = nullptr;

  explicit PlannedCall(const AttendArgs& call) : args(call) {
    if (args.rotary) args.layout.num_heads = args.num_query_heads / latent_group(args);
    kernel = attention_kernels().attend_kernel(args);
    plan = plan_attention(args, kernel.width);
  }

  void attend(const AttendItem& item) const { kernel.attend(args, item, partials); }
  void merge() const {
    parallel_for(int(plan.merges.size()), [&](int item) { kernel.merge(args, plan.merges[item], partials); });
  }
};

// Items of two calls, of which the second ones join what the first ones give.
struct ItemPairs {
  std::vector<const AttendItem*> alone;                              // of the first call
  std::vector<std::pair<const AttendItem*, const AttendItem*>> all;  // (first or null, second)
};

// An item of each call, where both finish the same rows; the others are no pairs.
ItemPairs pair_items(const PlannedCall& first, const PlannedCall& second) {
  const AttendArgs& args = first.args;
  const int num_heads = args.layout.num_heads;
  const bool comparable = num_heads == second.args.layout.num_heads;
  std::vector<const AttendItem*> partners(size_t(num_tokens(args)) * num_heads);
  const auto partner = [&](const AttendItem& item) -> const AttendItem*& {
    return partners[size_t(item.first_token) * num_heads + item.kv_head];
  };
  for (const AttendItem& item : second.plan.items)
    if (comparable && item.partial < 0) partner(item) = &item;
  ItemPairs pairs;
  for (const AttendItem& item : first.plan.items) {
    const AttendItem* const other = partner(item);
    if (item.partial >= 0 || other == nullptr || other->num_tokens != item.num_tokens ||
        other->num_heads != item.num_heads) {
      pairs.alone.push_back(&item);
      continue;
    }
    pairs.all.push_back({&item, other});
    partner(item) = nullptr;
  }
  for (const AttendItem& item : second.plan.items)
    if (!comparable || item.partial >= 0 || partner(item) != nullptr) pairs.all.push_back({nullptr, &item});
  return pairs;
}

// The second item of a pair joins what the first one gives, which stays in this thread's memory.
void attend_pair(const PlannedCall& first, const AttendItem& first_item, const PlannedCall& second,
                 const AttendItem& second_item) {
  const int group = group_size(first.args), num_heads = first_item.num_heads * group;
  const int dim = first.args.layout.v.dim;
  const size_t num_rows = size_t(first_item.num_tokens) * num_heads;
  float* const memory =
      static_cast<float*>(thread_scratch(sizeof(float) * num_rows * size_t(dim + 2), kPartSlot));
  const int64_t first_row = int64_t(first_item.first_token) * num_heads + first_item.kv_head * group;
  const FloatRows rows = FloatRows::in(memory, num_rows, dim, num_heads, first_row);
  if (first_item.num_tiles == 0) {  // what its kernel gives where nothing is seen
    std::fill(rows.rows, rows.maxima, 0.0f);
    std::fill(rows.maxima, rows.sums, kLowest);
    std::fill(rows.sums, rows.sums + num_rows, 0.0f);
  } else {
    AttendArgs args = first.args;
    args.part = rows;
    first.kernel.attend(args, first_item, nullptr);
  }
  AttendArgs args = second.args;
  args.other = rows;
  second.kernel.attend(args, second_item, nullptr);
}

}  // namespace

void run_attention(const AttendArgs& args) {
  PlannedCall call(args);
  call.partials = partial_buffer(call.plan.partial_floats);
  parallel_for(int(call.plan.items.size()), [&](int item) { call.attend(call.plan.items[item]); });
  call.merge();
}

void run_attention(const AttendArgs& first_args, const AttendArgs& second_args) {
  PlannedCall first(first_args), second(second_args);
  first.args.sinks = nullptr;  // they are folded in once, where parts are joined
  const ItemPairs pairs = pair_items(first, second);
  const int num_heads = first.args.num_query_heads, dim = first.args.layout.v.dim;
  const int64_t num_rows = pairs.alone.empty() ? 0 : int64_t(num_tokens(first.args)) * num_heads;
  const int64_t partials = first.plan.partial_floats + second.plan.partial_floats;
  first.partials = partial_buffer(partials + num_rows * (dim + 2));
  second.partials = first.partials + first.plan.partial_floats;
  float* const rows = first.partials + partials;
  if (num_rows > 0)
    first.args.part = second.args.other = FloatRows::in(rows, size_t(num_rows), dim, num_heads, 0);
  parallel_for(int(pairs.alone.size()), [&](int item) { first.attend(*pairs.alone[item]); });
  first.merge();
  parallel_for(int(pairs.all.size()), [&](int item) {
    const auto [of_first, of_second] = pairs.all[item];
    if (of_first != nullptr) attend_pair(first, *of_first, second, *of_second);
    else second.attend(*of_second);
  });
  second.merge();
}

namespace {

struct AttendOptions {
  float scale, softcap;
  int window, keep;
  bool sinks, mask, rotary;  // which of the optional inputs there are
  bool exact;
};

class Attend : public mx::Primitive {
 public:
  Attend(mx::Stream stream, const PageLayout& layout, const AttendOptions& options)
      : Primitive(stream), layout_(layout), options_(options) {}

  // pool, queries, page_table, q_start, kv_len, maybe sinks, a mask, rotary queries -> out
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    allocate(out);
    AttendArgs args{};
    args.layout = layout_;
    args.pool = inputs[0].data<uint8_t>();
    args.queries = view_rows(inputs[1]);
    args.out = out.data<void>();
    args.page_table = view_ints(inputs[2]);
    args.q_start = view_ints(inputs[3]);
    args.kv_len = view_ints(inputs[4]);
    size_t next = 5;
    if (options_.sinks) args.sinks = inputs[next++].data<float>();
    if (options_.mask) args.mask = view_mask(inputs[next++]);
    args.table_width = inputs[2].shape(1);
    args.num_sequences = inputs[4].shape(0);
    args.num_query_heads = inputs[1].shape(1);
    args.scale = options_.scale;
    args.softcap = options_.softcap;
    args.window = options_.window;
    args.keep = options_.keep;
    args.exact = options_.exact;
    if (options_.rotary) attend_latents(args, view_rows(inputs[next]));
    Encoder(stream()).dispatch([args] { run_attention(args); });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("octavo's paged attention primitive runs on the CPU only");
  }
  const char* name() const override { return "OctavoAttend"; }

 private:
  PageLayout layout_;
  AttendOptions options_;
};

mx::array attend(const PageLayout& layout, const mx::array& pool, const mx::array& queries,
                 const mx::array& page_table, const mx::array& q_start, const mx::array& kv_len, float scale,
                 int window, int keep, float softcap, const std::optional<mx::array>& sinks,
                 const std::optional<mx::array>& mask, const std::optional<mx::array>& rotary, bool exact) {
  require_pool(layout, pool);
  require_rows("queries", queries, layout.num_heads, layout.k.dim, true);
  require(page_table.ndim() == 2,
          [&] { return "page_table must be [B, P], got " + shape_text(page_table.shape()); });
  require_ints("page_table", page_table, page_table.shape());
  require_ints("q_start", q_start, {page_table.shape(0) + 1});
  require_ints("kv_len", kv_len, {page_table.shape(0)});
  require(window >= 0 && keep >= 0 && softcap >= 0,
          [] { return "window, keep and softcap must not be negative"; });
  const mx::Stream stream = cpu_stream();
  std::vector<mx::array> inputs = {pool, queries, page_table, q_start, kv_len};
  add_per_head(inputs, "sinks", sinks, queries.shape(1), stream);
  add_mask(inputs, mask, queries, stream);
  add_rotary(inputs, rotary, layout, queries, softcap);
  const AttendOptions options{
      scale, softcap, window, keep, sinks.has_value(), mask.has_value(), rotary.has_value(), exact};
  const int dim = rotary ? layout.k.dim : layout.v.dim;
  return mx::array({queries.shape(0), queries.shape(1), dim}, queries.dtype(),
                   std::make_shared<Attend>(stream, layout, options), std::move(inputs));
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<PageLayout>(m, "PageLayout", "Where the rows of one layer's pool lie.")
      .def_prop_ro("head_bytes", [](const PageLayout& layout) { return layout.head_bytes; })
      .def_prop_ro("pool_bytes", [](const PageLayout& layout) {
        return layout.num_pages * layout.num_heads * layout.head_bytes;
      });
  m.def("page_layout", &make_layout, nb::arg("num_pages"), nb::arg("num_heads"), nb::arg("page_size"),
        nb::arg("k_format"), nb::arg("k_dim"), nb::arg("v_format"), nb::arg("v_dim"),
        "The layout of a layer's pool; ValueError names what the kernels cannot hold.");
  m.def("create_pool", &create_pool, nb::arg("layout"),
        "A zeroed uint8 pool [num_pages, num_heads, head_bytes], aligned for the kernels.");
  m.def("backing_pools", &backing_pools,
        "Whether memory of pools or zeroed rows is still being backed with pages in the background.");
  m.def("zeroed_rows", &zeroed_rows, nb::arg("count"), nb::arg("bytes"),
        "Zeros uint8 [count, bytes] in memory of their own, on huge pages where the system grants them.");
  m.def("write_pages", &write_pages, nb::arg("layout"), nb::arg("pool"), nb::arg("keys"), nb::arg("values"),
        nb::arg("slots"), nb::arg("flags"),
        "(pool, flags) after storing keys [T, H, Dk] and values [T, H, Dv] in place; flags [T] int32 "
        "become 1 where a row was not storable. The caller checks that slots lie in the pool.");
  m.def("copy_pages", &copy_pages, nb::arg("layout"), nb::arg("pool"), nb::arg("pairs"),
        "The pool after copying page source onto page target, in place, for each pair in order.");
  m.def("gather_pages", &gather_pages, nb::arg("layout"), nb::arg("pool"), nb::arg("page_table"),
        nb::arg("kv_len"), nb::arg("length"), nb::arg("like"),
        "Dense (K [B, H, length, Dk], V [B, H, length, Dv]) in the dtype of `like`, zeros past kv_len.");
  m.def("attend", &attend, nb::arg("layout"), nb::arg("pool"), nb::arg("queries"), nb::arg("page_table"),
        nb::arg("q_start"), nb::arg("kv_len"), nb::arg("scale"), nb::arg("window"), nb::arg("keep"),
        nb::arg("softcap"), nb::arg("sinks").none(), nb::arg("mask").none(), nb::arg("rotary").none(),
        nb::arg("exact"),
        "Causal paged attention [T, Hq, Dv]; window and softcap 0 mean none. A mask [T, 1 or Hq, L], bool or "
        "float, takes the place of causality and window. rotary [T, Hq, Dv]: K rows are latents and V too, V "
        "rows "
        "rotary keys whose dot products with these queries join the scaled logits; the result is [T, Hq, D]. "
        "exact: no arithmetic of 8 bits, and floats over bf16 "
        "pages. The caller checks the indices and L = max kv_len.");
}

}  // namespace octavo
