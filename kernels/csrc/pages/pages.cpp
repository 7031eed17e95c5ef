#include "pages/pages.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "linear/packed.h"
#include "program/step_memory.h"
#include "runtime/threads.h"

namespace octavo {
namespace {

using Arrays = std::vector<mx::array>;

// Base of page primitives.
class PagePrimitive : public CpuPrimitive {
 public:
  PagePrimitive(mx::Stream stream, const PageLayout& layout) : CpuPrimitive(stream), layout_(layout) {}

 protected:
  PageLayout layout_;
};

// Gives the input's buffer to the output. This is safe because a pool is written at most once per evaluation,
// and readers use the handle that the write returned. MLX orders nodes only by such dependencies.
void write_in_place(const mx::array& input, mx::array& output) {
  if (!input.flags().row_contiguous) throw std::invalid_argument("a pool must be row contiguous");
  output.copy_shared_buffer(input);
}

class WritePages : public PagePrimitive {
 public:
  using PagePrimitive::PagePrimitive;

  // pool, flags, keys, values, slots -> pool, flags
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    for (int i : {0, 1}) write_in_place(inputs[i], outputs[i]);
    WriteArgs args{};
    args.layout = layout_;
    args.pool = outputs[0].data<uint8_t>();
    args.flags = outputs[1].data<int32_t>();
    args.keys = view_rows(inputs[2]);
    args.values = view_rows(inputs[3]);
    args.slots = view_ints(inputs[4]);
    args.num_tokens = inputs[4].shape(0);
    Encoder(stream()).dispatch([args] {
      // Blocks of fewer than about 16 rows of K and V cost more than a thread saves. Within longer blocks the
      // next rows can be prefetched.
      const int tokens = std::max({1, 16 / args.layout.num_heads, args.num_tokens / (8 * num_threads())});
      parallel_for((args.num_tokens + tokens - 1) / tokens, [&](int block) {
        attention_kernels().write(args, block * tokens, std::min(args.num_tokens, (block + 1) * tokens));
      });
    });
  }
  const char* name() const override { return "OctavoWritePages"; }
};

class CopyPages : public PagePrimitive {
 public:
  CopyPages(mx::Stream stream, const PageLayout& layout, std::vector<std::pair<int, int>> pairs)
      : PagePrimitive(stream, layout), pairs_(std::move(pairs)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    write_in_place(inputs[0], outputs[0]);
    const size_t page_bytes = size_t(layout_.head_bytes) * layout_.num_heads;
    Encoder(stream()).dispatch([pool = outputs[0].data<uint8_t>(), page_bytes, pairs = pairs_] {
      for (const auto& [source, target] : pairs)
        std::memmove(pool + target * page_bytes, pool + source * page_bytes, page_bytes);
    });
  }
  const char* name() const override { return "OctavoCopyPages"; }

 private:
  std::vector<std::pair<int, int>> pairs_;
};

class GatherPages : public PagePrimitive {
 public:
  using PagePrimitive::PagePrimitive;

  // pool, page_table, kv_len -> K, V
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    for (mx::array& out : outputs) allocate(out);
    GatherArgs args{};
    args.layout = layout_;
    args.pool = inputs[0].data<uint8_t>();
    args.page_table = view_ints(inputs[1]);
    args.kv_len = view_ints(inputs[2]);
    args.table_width = inputs[1].shape(1);
    args.num_sequences = inputs[2].shape(0);
    args.length = outputs[0].shape(2);
    args.type = float_of(outputs[0].dtype());
    args.keys = outputs[0].data<void>();
    args.values = outputs[1].data<void>();
    Encoder(stream()).dispatch([args] {
      parallel_for(args.num_sequences * args.layout.num_heads, [&](int item) {
        attention_kernels().gather(args, item / args.layout.num_heads, item % args.layout.num_heads, 0,
                                   args.length);
      });
    });
  }
  const char* name() const override { return "OctavoGatherPages"; }
};

// Returns uint8 zeros in memory that is aligned to cache lines, unlike MLX's. Huge pages, if the system
// grants them, save most TLB misses of attention's scattered reads and of recurrences, which read all states.
mx::array array_in_pool_memory(const mx::Shape& shape) {
  size_t bytes = 1;
  for (const auto size : shape) bytes *= size_t(size);
  const auto memory = std::make_shared<const Buffer>(kLine + bytes);
  mx::allocator::Data data(buffer_in(reinterpret_cast<char*>(memory->data()), bytes),
                           [memory](mx::allocator::Buffer) {});
  return mx::array(std::move(data), shape, mx::uint8);
}

}  // namespace

mx::array zeroed_rows(int count, int bytes) {
  require(count > 0 && bytes > 0, [&] {
    return "rows must be at least 1, of at least 1 byte, got " + std::to_string(count) + " of " +
           std::to_string(bytes);
  });
  return array_in_pool_memory({count, bytes});
}

mx::array create_pool(const PageLayout& layout) { return array_in_pool_memory(pool_shape(layout)); }

std::pair<mx::array, mx::array> write_pages(const PageLayout& layout, const mx::array& pool,
                                            const mx::array& keys, const mx::array& values,
                                            const mx::array& slots, const mx::array& flags) {
  require_pool(layout, pool);
  require_rows("keys", keys, layout.num_heads, layout.k.dim);
  require_rows("values", values, layout.num_heads, layout.v.dim);
  require_ints("slots", slots, {keys.shape(0)});
  require_ints("slots", slots, {values.shape(0)});
  require_ints("flags", flags, slots.shape());
  const Arrays out = mx::array::make_arrays({pool.shape(), flags.shape()}, {mx::uint8, mx::int32},
                                            std::make_shared<WritePages>(cpu_stream({}), layout),
                                            {pool, flags, keys, values, slots});
  return {out[0], out[1]};
}

mx::array copy_pages(const PageLayout& layout, const mx::array& pool,
                     const std::vector<std::pair<int, int>>& pairs) {
  require_pool(layout, pool);
  for (const auto& [source, target] : pairs)
    for (const int page : {source, target})
      require(page >= 0 && page < layout.num_pages, [&, page = page] {
        return "pages must lie in [0, " + std::to_string(layout.num_pages) + "), got " + std::to_string(page);
      });
  return mx::array(pool.shape(), mx::uint8, std::make_shared<CopyPages>(cpu_stream({}), layout, pairs),
                   {pool});
}

std::pair<mx::array, mx::array> gather_pages(const PageLayout& layout, const mx::array& pool,
                                             const mx::array& page_table, const mx::array& kv_len, int length,
                                             const mx::array& like) {
  require_pool(layout, pool);
  require(page_table.ndim() == 2,
          [&] { return "page_table must be [B, P], got " + shape_text(page_table.shape()); });
  require_ints("page_table", page_table, page_table.shape());
  require_ints("kv_len", kv_len, {page_table.shape(0)});
  require(length >= 0, [&] { return "length must not be negative, got " + std::to_string(length); });
  const int num_sequences = kv_len.shape(0);
  const mx::Shape keys = {num_sequences, layout.num_heads, length, layout.k.dim};
  const mx::Shape values = {num_sequences, layout.num_heads, length, layout.v.dim};
  const Arrays out = mx::array::make_arrays({keys, values}, {like.dtype(), like.dtype()},
                                            std::make_shared<GatherPages>(cpu_stream({}), layout),
                                            {pool, page_table, kv_len});
  return {out[0], out[1]};
}

}  // namespace octavo
