// Quantize-and-write into pages, and dense gathering out of them, for the level OCTAVO_ISA.
//
// Codes and scales are bit-equal to octavo.kernels.formats: every float operation below is one rounding
// in the order that kernels/README.md defines (the build forbids contraction into FMA).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "attention.h"
#include "attention_rows.h"
#include "attention_tiles.h"

namespace octavo::OCTAVO_ISA {
namespace {

// ---- 16-bit rows: false if a value would be stored as NaN or infinity ----

bool store_bf16(const float* row, int dim, uint8_t* codes) {
  bool storable = true;
  for (int i = 0; i < dim; ++i) {
    const uint16_t bits = float_to_bf16(row[i]);
    storable &= (bits & 0x7f80) != 0x7f80;
    std::memcpy(codes + 2 * i, &bits, 2);
  }
  return storable;
}

bool store_fp16(const float* row, int dim, uint8_t* codes) {
  bool storable = true;
  for (int i = 0; i < dim; ++i) {
    const uint16_t bits = float_to_f16(row[i]);
    storable &= (bits & 0x7c00) != 0x7c00;
    std::memcpy(codes + 2 * i, &bits, 2);
  }
  return storable;
}

// ---- fp4 ----

// Candidate scales are absmax times these, tried in this order (octavo.kernels.formats.fp4).
constexpr float kScaleFactors[] = {float(1.0 / 6), float(0.94 / 6), float(0.88 / 6), float(1.08 / 6),
                                   float(1.36 / 6)};

// The value on the grid {0, .5, 1, 1.5, 2, 3, 4, 6} * scale nearest to a magnitude, ties to the even
// code. Products and partial sums are exact: a scale has 11 significant bits.
inline float nearest(float magnitude, float scale) {
  float value = 0;
  value += magnitude > scale * 0.25f ? scale * 0.5f : 0.0f;
  value += magnitude >= scale * 0.75f ? scale * 0.5f : 0.0f;
  value += magnitude > scale * 1.25f ? scale * 0.5f : 0.0f;
  value += magnitude >= scale * 1.75f ? scale * 0.5f : 0.0f;
  value += magnitude > scale * 2.5f ? scale * 1.0f : 0.0f;
  value += magnitude >= scale * 3.5f ? scale * 1.0f : 0.0f;
  value += magnitude > scale * 5.0f ? scale * 2.0f : 0.0f;
  return value;
}

inline int nearest_index(float magnitude, float scale) {
  return (magnitude > scale * 0.25f) + (magnitude >= scale * 0.75f) + (magnitude > scale * 1.25f) +
         (magnitude >= scale * 1.75f) + (magnitude > scale * 2.5f) + (magnitude >= scale * 3.5f) +
         (magnitude > scale * 5.0f);
}

// Sum of squared errors over a row padded with zeros to `width`, a power of two: halves are added onto
// each other until one value is left.
float squared_error(const float* magnitudes, int width, float scale, float* errors) {
  for (int i = 0; i < width; ++i) {
    const float difference = magnitudes[i] - nearest(magnitudes[i], scale);
    errors[i] = difference * difference;
  }
  while (width > 1) {
    width /= 2;
    for (int i = 0; i < width; ++i) errors[i] += errors[i + width];
  }
  return errors[0];
}

// The fp16 scale whose grid has the smallest squared error; 0 if every candidate rounds to 0.
uint16_t best_scale(const float* magnitudes, int width) {
  alignas(64) float errors[kMaxDim];
  float absmax = 0;
  for (int i = 0; i < width; ++i) absmax = magnitudes[i] > absmax ? magnitudes[i] : absmax;
  uint16_t best = 0;
  float best_error = 0;
  for (const float factor : kScaleFactors) {
    const uint16_t bits = float_to_f16(std::min(absmax * factor, 65504.0f));
    if (bits == 0) continue;
    const float error = squared_error(magnitudes, width, f16_to_float(bits), errors);
    if (best != 0 && !(error < best_error)) continue;
    best = bits;
    best_error = error;
  }
  return best;
}

bool store_fp4(const float* row, int dim, uint8_t* codes, uint8_t* scale) {
  alignas(64) float magnitudes[kMaxDim];
  int width = 1;
  while (width < dim) width *= 2;
  bool storable = true;
  for (int i = 0; i < dim; ++i) {
    magnitudes[i] = std::fabs(row[i]);
    storable &= magnitudes[i] <= 3.402823466e38f;
  }
  if (!storable) return false;
  for (int i = dim; i < width; ++i) magnitudes[i] = 0;
  const uint16_t bits = best_scale(magnitudes, width);
  std::memcpy(scale, &bits, 2);
  if (bits == 0) {
    std::memset(codes, 0, size_t(dim) / 2);
    return true;
  }
  const float factor = f16_to_float(bits);
  alignas(64) uint8_t nibbles[kMaxDim];
  for (int i = 0; i < dim; ++i)
    nibbles[i] = uint8_t(nearest_index(magnitudes[i], factor) | (std::signbit(row[i]) ? 8 : 0));
  for (int i = 0; i < dim / 2; ++i) codes[i] = uint8_t(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
  return true;
}

// False: the row is not storable, and zeros are stored.
bool store_page_row(const RowFormat& format, float* row, uint8_t* codes, uint8_t* scale) {
  if (format.rotated) hadamard(row, format.dim);
  bool storable = false;
  switch (format.codes) {
    case CodeType::bf16: storable = store_bf16(row, format.dim, codes); break;
    case CodeType::fp16: storable = store_fp16(row, format.dim, codes); break;
    case CodeType::fp4: storable = store_fp4(row, format.dim, codes, scale); break;
  }
  if (storable) return true;
  std::memset(codes, 0, size_t(format.row_bytes));
  std::memset(scale, 0, size_t(format.scale_bytes));
  return false;
}

void write(const WriteArgs& args, int first_token, int end_token) {
  const PageLayout& layout = args.layout;
  alignas(64) float row[kMaxDim];
  for (int token = first_token; token < end_token; ++token) {
    const int page = args.slots[token] >> layout.page_shift;
    const int offset = args.slots[token] & (layout.page_size - 1);
    bool storable = true;
    for (int head = 0; head < layout.num_heads; ++head) {
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

AttendKernel attend_kernel(const AttendArgs& args);  // attention_portable.cpp, attention_avx512.cpp

const AttentionKernels attention_kernels = {write, gather, attend_kernel};

}  // namespace octavo::OCTAVO_ISA
