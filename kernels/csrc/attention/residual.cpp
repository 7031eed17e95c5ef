// Attention over two pools that hold the rows of the same layer: quantized pages, and 16-bit
// residual pages of some.
//
// Each pool is attended over by the kernels of its own formats. Those of the quantized pages leave float rows
// and the logarithms of their sums of weights; those of the residual pages weight both by these, and fold in
// the sinks, as they finish their rows.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <memory>
#include <optional>
#include <vector>

#include "attention/primitives.h"
#include "mlx/primitives.h"
#include "pages/pages.h"
#include "program/encoder.h"

namespace nb = nanobind;

namespace octavo {
namespace {

// `args` of the whole call, but for what is one pool's; `rotary` queries where its K rows are latents.
AttendArgs part_of(AttendArgs args, const PageLayout& layout, const uint8_t* pool, const int32_t* page_table,
                   Residency::Part which, const std::optional<RowsView>& rotary) {
  args.layout = layout;
  if (rotary) attend_latents(args, *rotary);
  args.pool = pool;
  args.page_table = page_table;
  args.residency.part = which;
  return args;
}

struct ResidualOptions {
  float scale, softcap;
  int window, keep;                    // of the layer
  int residual_window, residual_keep;  // see Residency
  bool sinks, mask, rotary, exact;
};

class AttendResidual : public mx::Primitive {
 public:
  AttendResidual(mx::Stream stream, const PageLayout& layout, const PageLayout& residual,
                 const ResidualOptions& options)
      : Primitive(stream), layout_(layout), residual_(residual), options_(options) {}

  // pool, residual, queries, page_table, residual_table, q_start, kv_len, starts, maybe sinks,
  // mask, rotary queries -> out
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    allocate(out);
    AttendArgs args{};
    args.layout = layout_;
    args.queries = view_rows(inputs[2]);
    args.out = out.data<void>();
    args.table_width = inputs[3].shape(1);
    args.q_start = view_ints(inputs[5]);
    args.kv_len = view_ints(inputs[6]);
    args.num_sequences = inputs[6].shape(0);
    args.num_query_heads = inputs[2].shape(1);
    args.scale = options_.scale;
    args.softcap = options_.softcap;
    args.window = options_.window;
    args.keep = options_.keep;
    args.exact = options_.exact;
    args.residency = {Residency::all, options_.residual_window, options_.residual_keep, view_ints(inputs[7])};
    size_t next = 8;
    if (options_.sinks) args.sinks = inputs[next++].data<float>();
    if (options_.mask) args.mask = view_mask(inputs[next++]);
    std::optional<RowsView> rotary;
    if (options_.rotary) rotary = view_rows(inputs[next]);
    const uint8_t *pool = inputs[0].data<uint8_t>(), *residual_pool = inputs[1].data<uint8_t>();
    const int32_t *table = view_ints(inputs[3]), *residual_table = view_ints(inputs[4]);
    const AttendArgs first = part_of(args, layout_, pool, table, Residency::quantized, rotary);
    const AttendArgs second =
        part_of(args, residual_, residual_pool, residual_table, Residency::residual, rotary);
    Encoder(stream()).dispatch([first, second] { run_attention(first, second); });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("octavo's paged attention primitive runs on the CPU only");
  }
  const char* name() const override { return "OctavoAttendResidual"; }

 private:
  PageLayout layout_, residual_;
  ResidualOptions options_;
};

void require_residual(const PageLayout& layout, const PageLayout& residual) {
  require(
      layout.num_heads == residual.num_heads && layout.page_size == residual.page_size &&
          layout.k.dim == residual.k.dim && layout.v.dim == residual.v.dim,
      [] { return "residual pages must have the heads, dimensions and page size of those they stand for"; });
}

mx::array attend_residual(const PageLayout& layout, const mx::array& pool, const PageLayout& residual,
                          const mx::array& residual_pool, const mx::array& queries,
                          const mx::array& page_table, const mx::array& residual_table,
                          const mx::array& q_start, const mx::array& kv_len, const mx::array& starts,
                          float scale, int window, int keep, int residual_window, int residual_keep,
                          float softcap, const std::optional<mx::array>& sinks,
                          const std::optional<mx::array>& mask, const std::optional<mx::array>& rotary,
                          bool exact) {
  require_residual(layout, residual);
  require_pool(layout, pool);
  require_pool(residual, residual_pool);
  require_rows("queries", queries, layout.num_heads, layout.k.dim, true);
  require(page_table.ndim() == 2,
          [&] { return "page_table must be [B, P], got " + shape_text(page_table.shape()); });
  require_ints("page_table", page_table, page_table.shape());
  require_ints("residual_table", residual_table, page_table.shape());
  require_ints("q_start", q_start, {page_table.shape(0) + 1});
  require_ints("kv_len", kv_len, {page_table.shape(0)});
  require_ints("starts", starts, {queries.shape(0)});
  require(window >= 0 && keep >= 0 && softcap >= 0 && residual_window >= 1 && residual_keep >= 0,
          [] { return "windows, keeps and softcap must not be negative, and residual pages need a window"; });
  require(window == 0 || residual_keep == keep,
          [] { return "a layer with a window keeps the same positions in both pools"; });
  const mx::Stream stream = cpu_stream();
  std::vector<mx::array> inputs = {pool,           residual_pool, queries, page_table,
                                   residual_table, q_start,       kv_len,  starts};
  add_per_head(inputs, "sinks", sinks, queries.shape(1), stream);
  add_mask(inputs, mask, queries, stream);
  add_rotary(inputs, rotary, layout, queries, softcap);
  const ResidualOptions options{scale,
                                softcap,
                                window,
                                keep,
                                residual_window,
                                residual_keep,
                                sinks.has_value(),
                                mask.has_value(),
                                rotary.has_value(),
                                exact};
  const int dim = rotary ? layout.k.dim : layout.v.dim;
  return mx::array({queries.shape(0), queries.shape(1), dim}, queries.dtype(),
                   std::make_shared<AttendResidual>(stream, layout, residual, options), std::move(inputs));
}

}  // namespace

void bind_attention_residual(nb::module_& m) {
  m.def("attend_residual", &attend_residual, nb::arg("layout"), nb::arg("pool"), nb::arg("residual"),
        nb::arg("residual_pool"), nb::arg("queries"), nb::arg("page_table"), nb::arg("residual_table"),
        nb::arg("q_start"), nb::arg("kv_len"), nb::arg("starts"), nb::arg("scale"), nb::arg("window"),
        nb::arg("keep"), nb::arg("residual_window"), nb::arg("residual_keep"), nb::arg("softcap"),
        nb::arg("sinks").none(), nb::arg("mask").none(), nb::arg("rotary").none(), nb::arg("exact"),
        "As attend, over quantized pages and 16-bit residual pages: row t reads in 16 bits the positions "
        "from starts[t] on, at least its last residual_window ones, and the first "
        "residual_keep.");
}

}  // namespace octavo
