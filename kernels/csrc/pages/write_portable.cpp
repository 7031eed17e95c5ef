// Quantize-and-write into pages, and dense gathering out of them, for the level OCTAVO_ISA.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention/attention.h"
#include "attention/rows.h"
#include "attention/tiles.h"
#include "pages/codes.h"
#include "pages/quantize.h"

namespace octavo::OCTAVO_ISA {
namespace {

// False: the row is not storable, and zeros are stored.
bool store_page_row(const RowFormat& format, float* row, uint8_t* codes, uint8_t* scale) {
  if (store_row(format, row, codes, scale)) return true;
  std::memset(codes, 0, size_t(format.row_bytes));
  std::memset(scale, 0, size_t(format.scale_bytes));
  return false;
}

// Asks for a token's rows of a head before they are loaded: another thread computed them a moment ago. Inline
// for certain: GCC 12 drops calls of what only prefetches.
inline __attribute__((always_inline)) void ask_rows(const WriteArgs& args, int token, int head) {
  for (const RowsView* view : {&args.keys, &args.values})
    if (view->dim_stride == 1)
      ask_row(view->data, view->type, token * view->row_stride + head * view->head_stride,
              view == &args.keys ? args.layout.k.dim : args.layout.v.dim);
}

void write(const WriteArgs& args, int first_token, int end_token) {
  const PageLayout& layout = args.layout;
  alignas(64) float row[kMaxDim];
  for (int token = first_token; token < end_token; ++token) {
    const int page = args.slots[token] >> layout.page_shift;
    const int offset = args.slots[token] & (layout.page_size - 1);
    bool storable = true;
    for (int head = 0; head < layout.num_heads; ++head) {
      if (token + 1 < end_token) ask_rows(args, token + 1, head);
      uint8_t* base = args.pool + (int64_t(page) * layout.num_heads + head) * layout.head_bytes;
      load_row(args.keys, token, head, layout.k.dim, row);
      storable &= store_page_row(layout.k, row, const_cast<uint8_t*>(k_codes(layout, base, offset)),
                                 const_cast<uint8_t*>(k_scale(layout, base, offset)));
      load_row(args.values, token, head, layout.v.dim, row);
      storable &= store_page_row(layout.v, row, const_cast<uint8_t*>(v_codes(layout, base, offset)),
                                 const_cast<uint8_t*>(v_scale(layout, base, offset)));
    }
    if (!storable) args.flags[token] = 1;
  }
}

// Dense rows first..end of one sequence and head, dequantized and rotated back; zeros past kv_len.
void gather(const GatherArgs& args, int sequence, int head, int first, int end) {
  const PageLayout& layout = args.layout;
  const int32_t* table = args.page_table + sequence * args.table_width;
  alignas(64) float row[kMaxDim];
  for (int position = first; position < end; ++position) {
    const bool written = position < args.kv_len[sequence];
    const uint8_t* base = written ? args.pool + page_offset(layout, table, position, head) : nullptr;
    const int offset = position & (layout.page_size - 1);
    const int64_t at = (int64_t(sequence) * layout.num_heads + head) * args.length + position;
    for (const bool is_key : {true, false}) {
      const RowFormat& format = is_key ? layout.k : layout.v;
      if (written) {
        dequantize_row(format, is_key ? k_codes(layout, base, offset) : v_codes(layout, base, offset),
                       is_key ? k_scale(layout, base, offset) : v_scale(layout, base, offset), row);
        if (format.rotated) hadamard(row, format.dim);
      } else {
        std::fill(row, row + format.dim, 0.0f);
      }
      store_floats(is_key ? args.keys : args.values, args.type, size_t(at * format.dim), format.dim, row);
    }
  }
}

}  // namespace

AttendKernel attend_kernel(const AttendArgs& args);  // attention/attend_portable.cpp

const AttentionKernels attention_kernels = {write, gather, attend_kernel};

}  // namespace octavo::OCTAVO_ISA
