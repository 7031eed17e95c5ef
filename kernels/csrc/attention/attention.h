// Interface between the MLX primitives of paged attention and pages, the work planner, and the kernels of
// each instruction set. It has only plain data, and one table of functions per instruction set.
//
// A layer's pool is one uint8 array [num_pages, kv_heads, head_bytes]. One (page, head) is contiguous:
//
//   K codes [page_size] | K scales [page_size] | V codes [page_size] | V scales [page_size]
//
// so one head of one page is read as one run of memory. Codes and scales are stored as octavo.kernels.formats
// writes them; docs/spec/page-formats.md defines every bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/numeric.h"

namespace octavo {

enum class CodeType : int { bf16, fp16, int8, int4, fp4, fp5, mxfp4, nvfp4, affine8, affine4 };

// Rows of K (or of V): `dim` values each, stored as codes and, except for bf16 and fp16, scales.
struct RowFormat {
  CodeType codes;
  int dim;
  bool rotated;         // stored after the orthonormal Hadamard rotation
  int64_t row_bytes;    // size of one row's codes
  int64_t scale_bytes;  // size of one row's scales
};

struct PageLayout {
  int64_t num_pages;
  int num_heads;
  int page_size;   // a power of two
  int page_shift;  // log2(page_size)
  RowFormat k, v;
  int64_t k_scales, v_codes, v_scales;  // byte offsets inside one (page, head); K codes start at 0
  int64_t head_bytes;                   // bytes of one (page, head)
};

// Activations [rows, heads, dim] with any strides, in elements.
struct RowsView {
  const void* data;
  Float type;
  int64_t row_stride, head_stride, dim_stride;
};

struct WriteArgs {
  PageLayout layout;
  uint8_t* pool;
  RowsView keys, values;
  const int32_t* slots;  // [num_tokens]
  int32_t* flags;        // [num_tokens]; set to 1 for rows that could not be stored
  int num_tokens;
};

struct GatherArgs {
  PageLayout layout;
  const uint8_t* pool;
  const int32_t* page_table;  // [num_sequences, table_width]
  const int32_t* kv_len;      // [num_sequences]
  int64_t table_width;
  int num_sequences, length;  // length: positions per sequence in the output
  Float type;
  void *keys, *values;  // [num_sequences, num_heads, length, dim]
};

// How positions are divided between quantized pages and 16-bit residual pages. Row t reads its first `keep`
// positions, and all positions since starts[t] (a page boundary), from residual pages. It reads the others
// from quantized pages.
struct Residency {
  enum Part { all, quantized, residual } part;
  int keep;
  const int32_t* starts;  // [num_tokens]
};

// A mask [num_tokens, 1 or num_query_heads, length] that replaces causality and window, contiguous along
// positions. Either `seen` is 0 for hidden positions, or `added` is added to logits; values of kHidden or
// less hide. Without a mask both are null. Strides are in elements, 0 if heads share a row.
struct MaskView {
  const uint8_t* seen;
  const float* added;
  int64_t row_stride, head_stride;

  explicit operator bool() const { return seen != nullptr || added != nullptr; }
};

inline constexpr float kHidden = -1e30f;

// Logit of hidden positions (log2 domain): weights become 0, but differences between logits stay finite.
inline constexpr float kLowest = -1e30f;

// Rotary part of a latent (MLA) layer. Such a layer's pages store latents as K and rotary keys as V; latents
// serve as both keys and values. The scaled dot products of `queries` with rotary keys are added to the
// scaled logits. All query heads share one KV head, which the layout presents as several heads
// (`layout.num_heads`) at one address.
struct RotaryPart {
  RowFormat format;
  int64_t codes, scales;  // byte offsets inside one page
  RowsView queries;       // [num_tokens, num_query_heads, format.dim]

  explicit operator bool() const { return queries.data != nullptr; }
};

// Weighted sums as float rows, with dims in order. The sums are relative to 2^maximum and not yet divided by
// the sums of weights. The row of token t and query head h has index t * num_heads + h.
struct FloatRows {
  float *rows, *maxima, *sums;  // [rows, v.dim], [rows], [rows]; or null
  int num_heads;

  explicit operator bool() const { return rows != nullptr; }
  int64_t at(int64_t token, int head) const { return token * num_heads + head; }

  // Returns rows inside `memory`, which has num_rows * (dim + 2) floats.
  static FloatRows in(float* memory, size_t num_rows, int dim, int num_heads) {
    float* const maxima = memory + num_rows * size_t(dim);
    return {memory, maxima, maxima + num_rows, num_heads};
  }
};

struct AttendArgs {
  PageLayout layout;  // for latent layers, V rows are the K rows
  const uint8_t* pool;
  RowsView queries;  // [num_tokens, num_query_heads, k.dim]
  void* out;         // [num_tokens, num_query_heads, v.dim], contiguous, of the queries' type
  const int32_t* page_table;
  const int32_t* q_start;
  const int32_t* kv_len;
  const float* sinks;  // [num_query_heads] or null
  int64_t table_width;
  int num_sequences, num_query_heads;
  float scale, softcap;  // softcap 0: no cap
  bool exact;            // queries keep at least 15 bits over int8 pages, and all bits over other pages
  int window, keep;      // window 0: no window
  MaskView mask;
  RotaryPart rotary;
  Residency residency;  // default: all positions are in one pool
  FloatRows part;       // replaces `out` if the results are partial
  FloatRows other;      // another pool's results, which are joined with these before sinks are added
};

// Positions per tile; tiles begin at multiples of it. Pages shorter than kShortestPage are copied first.
inline constexpr int kTileTokens = 64;
inline constexpr int kShortestPage = 16;

// Positions per part. Sums over positions are computed part by part, and the parts are added in order. So a
// result is bit-identical whether one item computes all parts or each part has an item of its own.
inline constexpr int kPartTokens = 1024;

// Work of one thread: some query tokens of one sequence, all query heads of one KV head, and some visible
// tiles.
struct AttendItem {
  int sequence, kv_head;
  int first_token, num_tokens;  // rows of the batch
  int first_tile, num_tiles;    // indices in the list of visible tiles, see attention/tiles.h
  int64_t partial;              // offset in the buffer of partial results; -1: write the output
};

// Rows whose positions were divided among several items; their partial results are adjacent.
struct MergeItem {
  int kv_head, first_token, num_tokens;
  int num_partials;
  int64_t partial;
};

// Kernel of a call. It writes a partial result of R rows as floats: accumulators [R, width], maxima [R], sums
// [R].
struct AttendKernel {
  void (*attend)(const AttendArgs&, const AttendItem&, float* partials);
  void (*merge)(const AttendArgs&, const MergeItem&, const float* partials);
  int width;  // floats per accumulator row
};

struct AttentionKernels {
  void (*write)(const WriteArgs&, int first_token, int end_token);
  void (*gather)(const GatherArgs&, int sequence, int head, int first, int end);  // positions [first, end)
  AttendKernel (*attend_kernel)(const AttendArgs&);
};

inline int group_size(const AttendArgs& args) { return args.num_query_heads / args.layout.num_heads; }

inline int64_t partial_floats(const AttendArgs& args, int num_tokens, int width) {
  return int64_t(num_tokens) * group_size(args) * (width + 2);
}

namespace generic {
extern const AttentionKernels attention_kernels;
}
namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}

// Returns the kernel table of the level in use (runtime/dispatch.h).
const AttentionKernels& attention_kernels();

}  // namespace octavo
