// The MLX primitive of paged attention over one or two pools, and the bindings of attention and pages.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/plan.h"
#include "attention/primitives.h"
#include "pages/pages.h"
#include "program/encoder.h"
#include "runtime/threads.h"

namespace nb = nanobind;

namespace octavo {
namespace {

// Returns the buffer for partial results of split items, or of a pool whose rows another pool completes. It
// is kept between calls, because all layers of a step need the same size, and freed if a call needs far less.
float* partial_buffer(int64_t size) {
  static thread_local std::vector<float> buffer;
  constexpr size_t kKeep = size_t(1) << 20;
  const size_t wanted = size_t(size);
  if (buffer.size() < wanted || (buffer.size() > kKeep && buffer.size() / 8 > wanted))
    std::vector<float>(wanted).swap(buffer);
  return buffer.data();
}

// Turns `args` into a latent call, for a layer whose pages hold latents as K and rotary keys as V.
void attend_latents(AttendArgs& args, const RowsView& rotary_queries) {
  const PageLayout stored = args.layout;
  args.rotary = {stored.v, stored.v_codes, stored.v_scales, rotary_queries};
  args.layout.v = stored.k;
  args.layout.v_codes = 0;
  args.layout.v_scales = stored.k_scales;
}

// A call with its kernel and its division into items.
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

  void run() const {
    parallel_for(int(plan.items.size()), [&](int item) { kernel.attend(args, plan.items[item], partials); });
    parallel_for(int(plan.merges.size()), [&](int item) { kernel.merge(args, plan.merges[item], partials); });
  }
};

// Runs one call on all threads. Called by the thread that evaluates the primitive.
void run_attention(const AttendArgs& args) {
  PlannedCall call(args);
  call.partials = partial_buffer(call.plan.partial_floats);
  call.run();
}

// Runs the same attention over two pools: the second call joins both results into `second.out` and adds
// `second.sinks`.
void run_attention(const AttendArgs& first_args, const AttendArgs& second_args) {
  PlannedCall first(first_args), second(second_args);
  first.args.sinks = nullptr;  // sinks are folded in once, by the second call
  const int num_heads = first.args.num_query_heads, dim = first.args.layout.v.dim;
  const int64_t num_rows = int64_t(first.args.q_start[first.args.num_sequences]) * num_heads;
  const int64_t partials = first.plan.partial_floats + second.plan.partial_floats;
  first.partials = partial_buffer(partials + num_rows * (dim + 2));
  second.partials = first.partials + first.plan.partial_floats;
  first.args.part = second.args.other =
      FloatRows::in(first.partials + partials, size_t(num_rows), dim, num_heads);
  first.run();
  second.run();
}

MaskView view_mask(const mx::array& mask) {
  MaskView view{};
  if (mask.dtype() == mx::bool_) view.seen = reinterpret_cast<const uint8_t*>(mask.data<bool>());
  else view.added = mask.data<float>();
  view.row_stride = int64_t(mask.shape(1)) * mask.shape(2);
  view.head_stride = mask.shape(1) > 1 ? mask.shape(2) : 0;
  return view;
}

struct AttendOptions {
  float scale, softcap;
  int window, keep;          // the layer's window, and its first positions that stay visible
  int residual_keep;         // see Residency; 0 if there is one pool
  bool sinks, mask, rotary;  // which optional inputs are present
  bool exact;
};

// Attention over one pool, or over two pools of a layer: quantized pages, and 16-bit residual pages for some
// positions. Each pool has kernels for its format. The call over quantized pages leaves float rows with
// maxima and sums of weights. The call over residual pages joins these rows with its own and adds sinks.
class Attend : public CpuPrimitive {
 public:
  Attend(mx::Stream stream, const PageLayout& layout, const std::optional<PageLayout>& residual,
         const AttendOptions& options)
      : CpuPrimitive(stream), layout_(layout), residual_(residual), options_(options) {}

  // Inputs: queries, q_start, kv_len, pool, page_table; optional: residual pool, its page_table and starts,
  // sinks, mask, rotary queries. Output: out.
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    allocate(out);
    AttendArgs args{};
    args.queries = view_rows(inputs[0]);
    args.num_query_heads = inputs[0].shape(1);
    args.q_start = view_ints(inputs[1]);
    args.kv_len = view_ints(inputs[2]);
    args.num_sequences = inputs[2].shape(0);
    args.out = out.data<void>();
    args.table_width = inputs[4].shape(1);
    args.scale = options_.scale;
    args.softcap = options_.softcap;
    args.window = options_.window;
    args.keep = options_.keep;
    args.exact = options_.exact;
    size_t next = 5;
    if (residual_) {
      args.residency = {Residency::quantized, options_.residual_keep, view_ints(inputs[7])};
      next = 8;
    }
    if (options_.sinks) args.sinks = inputs[next++].data<float>();
    if (options_.mask) args.mask = view_mask(inputs[next++]);
    const auto over = [&](const PageLayout& layout, size_t pool, Residency::Part part) {
      AttendArgs of_pool = args;
      of_pool.layout = layout;
      if (options_.rotary) attend_latents(of_pool, view_rows(inputs[next]));
      of_pool.pool = inputs[pool].data<uint8_t>();
      of_pool.page_table = view_ints(inputs[pool + 1]);
      of_pool.residency.part = part;
      return of_pool;
    };
    if (!residual_) {
      const AttendArgs call = over(layout_, 3, Residency::all);
      return Encoder(stream()).dispatch([call] { run_attention(call); });
    }
    const AttendArgs first = over(layout_, 3, Residency::quantized);
    const AttendArgs second = over(*residual_, 5, Residency::residual);
    Encoder(stream()).dispatch([first, second] { run_attention(first, second); });
  }
  const char* name() const override { return residual_ ? "OctavoAttendResidual" : "OctavoAttend"; }

 private:
  PageLayout layout_;
  std::optional<PageLayout> residual_;
  AttendOptions options_;
};

// Residual pages of a call: layout, pool, page_table, starts, window and keep (see Residency).
using ResidualPages = std::tuple<PageLayout, mx::array, mx::array, mx::array, int, int>;

void require_residual(const PageLayout& layout, const ResidualPages& residual, const AttendOptions& options,
                      const mx::array& queries, const mx::array& page_table) {
  const auto& [pages, pool, table, starts, window, keep] = residual;
  require(layout.num_heads == pages.num_heads && layout.page_size == pages.page_size &&
              layout.k.dim == pages.k.dim && layout.v.dim == pages.v.dim,
          [] { return "residual pages must have the heads, dimensions and page size of quantized pages"; });
  require_pool(pages, pool);
  require_ints("residual_table", table, page_table.shape());
  require_ints("starts", starts, {queries.shape(0)});
  require(window >= 1 && keep >= 0,
          [] { return "windows, keeps and softcap must not be negative, and residual pages need a window"; });
  require(options.window == 0 || keep == options.keep,
          [] { return "keep must be equal in both pools of a layer with a window"; });
}

// Adds optional numbers, one per head, to a call's inputs, as floats.
void add_per_head(std::vector<mx::array>& inputs, const char* name, const std::optional<mx::array>& values,
                  int num_query_heads, mx::Stream stream) {
  if (!values) return;
  require(values->shape() == mx::Shape{num_query_heads}, [&] {
    return std::string(name) + " must be [" + std::to_string(num_query_heads) +
           "], one per query head, got " + shape_text(values->shape());
  });
  inputs.push_back(mx::contiguous(mx::astype(*values, mx::float32, stream), false, stream));
}

// Adds an optional mask [T, 1 or Hq, any], bool or float, to a call's inputs; view_mask returns its view.
void add_mask(std::vector<mx::array>& inputs, const std::optional<mx::array>& mask, const mx::array& queries,
              mx::Stream stream) {
  if (!mask) return;
  const bool fits = mask->ndim() == 3 && mask->shape(0) == queries.shape(0) &&
                    (mask->shape(1) == 1 || mask->shape(1) == queries.shape(1));
  require(fits, [&] { return "mask must be [T, 1 or Hq, L], got " + shape_text(mask->shape()); });
  const mx::Dtype dtype = mask->dtype() == mx::bool_ ? mx::bool_ : mx::float32;
  inputs.push_back(mx::contiguous(mx::astype(*mask, dtype, stream), false, stream));
}

// Adds optional rotary queries [T, Hq, layout.v.dim] of the type of `queries` to a call's inputs; throws if
// the layer cannot hold latents.
void add_rotary(std::vector<mx::array>& inputs, const std::optional<mx::array>& rotary,
                const PageLayout& layout, const mx::array& queries, float softcap) {
  if (!rotary) return;
  require(layout.num_heads == 1 && softcap == 0, [] { return "latents need one KV head and no softcap"; });
  require_rows("rotary queries", *rotary, queries.shape(1), layout.v.dim, false);
  require(rotary->shape(0) == queries.shape(0) && rotary->dtype() == queries.dtype(),
          [] { return "rotary queries must have the rows and the type of the queries"; });
  inputs.push_back(*rotary);
}

mx::array attend(const PageLayout& layout, const mx::array& pool, const mx::array& queries,
                 const mx::array& page_table, const mx::array& q_start, const mx::array& kv_len, float scale,
                 int window, int keep, float softcap, const std::optional<mx::array>& sinks,
                 const std::optional<mx::array>& mask, const std::optional<mx::array>& rotary, bool exact,
                 const std::optional<ResidualPages>& residual) {
  AttendOptions options{
      scale, softcap, window, keep, 0, sinks.has_value(), mask.has_value(), rotary.has_value(), exact};
  require_pool(layout, pool);
  require_rows("queries", queries, layout.num_heads, layout.k.dim, true);
  require(page_table.ndim() == 2,
          [&] { return "page_table must be [B, P], got " + shape_text(page_table.shape()); });
  require_ints("page_table", page_table, page_table.shape());
  require_ints("q_start", q_start, {page_table.shape(0) + 1});
  require_ints("kv_len", kv_len, {page_table.shape(0)});
  require(window >= 0 && keep >= 0 && softcap >= 0,
          [] { return "window, keep and softcap must not be negative"; });
  const mx::Stream stream = cpu_stream({});
  std::vector<mx::array> inputs = {queries, q_start, kv_len, pool, page_table};
  std::optional<PageLayout> beside;
  if (residual) {
    require_residual(layout, *residual, options, queries, page_table);
    beside = std::get<0>(*residual);
    inputs.insert(inputs.end(), {std::get<1>(*residual), std::get<2>(*residual), std::get<3>(*residual)});
    options.residual_keep = std::get<5>(*residual);
  }
  add_per_head(inputs, "sinks", sinks, queries.shape(1), stream);
  add_mask(inputs, mask, queries, stream);
  add_rotary(inputs, rotary, layout, queries, softcap);
  const int dim = rotary ? layout.k.dim : layout.v.dim;
  return mx::array({queries.shape(0), queries.shape(1), dim}, queries.dtype(),
                   std::make_shared<Attend>(stream, layout, beside, options), std::move(inputs));
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<PageLayout>(m, "PageLayout", "Memory layout of one layer's pool.")
      .def_prop_ro("head_bytes", [](const PageLayout& layout) { return layout.head_bytes; })
      .def_prop_ro("pool_bytes", [](const PageLayout& layout) {
        return layout.num_pages * layout.num_heads * layout.head_bytes;
      });
  m.def("page_layout", &make_layout, nb::arg("num_pages"), nb::arg("num_heads"), nb::arg("page_size"),
        nb::arg("k_format"), nb::arg("k_dim"), nb::arg("v_format"), nb::arg("v_dim"),
        "Return the layout of a layer's pool. Raises ValueError for a size or format that the kernels do not "
        "support.");
  m.def("create_pool", &create_pool, nb::arg("layout"),
        "Return a zeroed uint8 pool [num_pages, num_heads, head_bytes], aligned for the kernels.");
  m.def("zeroed_rows", &zeroed_rows, nb::arg("count"), nb::arg("bytes"),
        "Return uint8 zeros [count, bytes] in newly allocated memory, on huge pages if the system has them.");
  m.def("write_pages", &write_pages, nb::arg("layout"), nb::arg("pool"), nb::arg("keys"), nb::arg("values"),
        nb::arg("slots"), nb::arg("flags"),
        "Store keys [T, H, Dk] and values [T, H, Dv] in place; return (pool, flags). flags [T] int32 are 1 "
        "for rows that could not be stored. The caller checks that slots lie in the pool.");
  m.def("copy_pages", &copy_pages, nb::arg("layout"), nb::arg("pool"), nb::arg("pairs"),
        "Copy pages in place, for each pair (source, target) in order; return the pool.");
  m.def("gather_pages", &gather_pages, nb::arg("layout"), nb::arg("pool"), nb::arg("page_table"),
        nb::arg("kv_len"), nb::arg("length"), nb::arg("like"),
        "Return dense (K [B, H, length, Dk], V [B, H, length, Dv]) in the dtype of `like`, with zeros past "
        "kv_len.");
  m.def(
      "attend", &attend, nb::arg("layout"), nb::arg("pool"), nb::arg("queries"), nb::arg("page_table"),
      nb::arg("q_start"), nb::arg("kv_len"), nb::arg("scale"), nb::arg("window"), nb::arg("keep"),
      nb::arg("softcap"), nb::arg("sinks").none(), nb::arg("mask").none(), nb::arg("rotary").none(),
      nb::arg("exact"), nb::arg("residual").none() = nb::none(),
      "Return causal paged attention [T, Hq, Dv]. window 0: no window. softcap 0: no softcap. mask [T, 1 "
      "or Hq, L], bool or float: replaces causality and window. rotary [T, Hq, Dv]: for MLA layers, whose "
      "K rows are latents (keys and values) and whose V rows are rotary keys; dot products of `rotary` and "
      "rotary keys are added to the scaled logits, and the result is [T, Hq, Dk]. exact: use no 8-bit "
      "arithmetic, and floats over bf16 pages. residual (layout, pool, page_table, starts, window, keep): "
      "16-bit pages, from which row t reads its first `keep` positions and those from starts[t] on, which "
      "include at least its last `window` positions. The caller checks the indices and that L = max kv_len.");
}

}  // namespace octavo
