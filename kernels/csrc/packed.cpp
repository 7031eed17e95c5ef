#include "packed.h"

#include <cstdlib>
#include <new>

#include "threads.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Rows of the panel that exist.
int panel_outputs(const PackedShape& shape, int panel) {
  const int left = shape.outputs - panel * kPanel;
  return left < kPanel ? left : kPanel;
}

// Place element (n, k) of a row-major matrix at [k / run][n][k % run] of its panel.
template <class T>
void pack_panel(const T* rows, int num_rows, int inputs, int run, T* panel) {
  for (int n = 0; n < num_rows; ++n) {
    const T* row = rows + static_cast<std::size_t>(n) * inputs;
    for (int k = 0; k < inputs; ++k)
      panel[(static_cast<std::size_t>(k / run) * kPanel + n) * run + k % run] = row[k];
  }
}

// MLX stores eight (four) codes per word, the first in the low bits.
uint32_t code_at(const uint32_t* row, int k, int bits) {
  const int per_word = 32 / bits;
  return (row[k / per_word] >> (k % per_word * bits)) & ((1u << bits) - 1);
}

// Four code bytes of output n that hold inputs [8 * i, 8 * i + 8) (q4) or [4 * i, 4 * i + 4) (q8).
uint32_t code_word(const uint32_t* row, int i, int bits) {
  if (bits == 8) return row[i];
  uint32_t word = 0;
  for (int j = 0; j < 4; ++j)
    word |= (code_at(row, 8 * i + j, 4) | code_at(row, 8 * i + 4 + j, 4) << 4) << (8 * j);
  return word;
}

template <class T>
void unpack_panel(const T* panel, int num_rows, int inputs, int run, T* rows) {
  for (int n = 0; n < num_rows; ++n)
    for (int k = 0; k < inputs; ++k)
      rows[static_cast<std::size_t>(n) * inputs + k] =
          panel[(static_cast<std::size_t>(k / run) * kPanel + n) * run + k % run];
}

// The inverse of code_word for q4: the four bytes of inputs [8 * i, 8 * i + 8) as MLX's word.
uint32_t mlx_word(uint32_t word, int bits) {
  if (bits == 8) return word;
  uint32_t codes = 0;
  for (int j = 0; j < 4; ++j) {
    codes |= ((word >> (8 * j)) & 15) << (4 * j);
    codes |= ((word >> (8 * j + 4)) & 15) << (4 * (4 + j));
  }
  return codes;
}

void pack_group(const PackedShape& shape, int panel, int group, const uint32_t* codes, const void* scales,
                const void* biases, uint8_t* block) {
  const int words = shape.group * shape.bits() / 32;
  const std::size_t row_words = static_cast<std::size_t>(words) * shape.num_groups();
  const std::size_t size = float_size(shape.scale_type);
  uint8_t* scale_row = block + shape.code_bytes();
  for (int n = 0; n < panel_outputs(shape, panel); ++n) {
    const std::size_t output = static_cast<std::size_t>(panel) * kPanel + n;
    const uint32_t* row = codes + output * row_words + static_cast<std::size_t>(group) * words;
    for (int i = 0; i < words; ++i) {
      const uint32_t word = code_word(row, i, shape.bits());
      std::memcpy(block + (static_cast<std::size_t>(i) * kPanel + n) * 4, &word, 4);
    }
    const std::size_t at = (output * shape.num_groups() + group) * size;
    std::memcpy(scale_row + n * size, static_cast<const uint8_t*>(scales) + at, size);
    std::memcpy(scale_row + (kPanel + n) * size, static_cast<const uint8_t*>(biases) + at, size);
  }
}

void quantized_row(const PackedWeight& weight, int output, float* out) {
  const PackedShape& shape = weight.shape;
  const int n = output % kPanel;
  for (int g = 0; g < shape.num_groups(); ++g) {
    const uint8_t* block = weight.panel(output / kPanel) + shape.block_bytes() * g;
    float scale, bias;
    load_floats(block + shape.code_bytes(), shape.scale_type, n, 1, &scale);
    load_floats(block + shape.code_bytes(), shape.scale_type, kPanel + n, 1, &bias);
    for (int k = 0; k < shape.group; ++k) {
      const bool wide = shape.kind == WeightKind::q8;
      const int word = wide ? k / 4 : k / 8, shift = wide ? 0 : (k % 8 >= 4 ? 4 : 0);
      const uint8_t byte = block[(static_cast<std::size_t>(word) * kPanel + n) * 4 + k % 4];
      const int code = wide ? byte : (byte >> shift) & 15;
      out[g * shape.group + k] = scale * static_cast<float>(code) + bias;
    }
  }
}

}  // namespace

Buffer::Buffer(std::size_t bytes) : size_(bytes) {
  const std::size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  const std::size_t rounded = (bytes + alignment) / alignment * alignment;  // never empty
  data_ = static_cast<uint8_t*>(std::aligned_alloc(alignment, rounded));
  if (data_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == kHugePage) madvise(data_, rounded, MADV_HUGEPAGE);  // advice: may be ignored
#endif
  std::memset(data_, 0, rounded);
}

Buffer::~Buffer() { std::free(data_); }

PackedWeight::PackedWeight(const PackedShape& shape, const void* weight)
    : shape(shape), panels(shape.panel_bytes() * shape.num_panels()) {
  parallel_for(shape.num_panels(), [&](int p) {
    uint8_t* out = panels.data() + shape.panel_bytes() * p;
    const std::size_t start = static_cast<std::size_t>(p) * kPanel * shape.inputs;
    const int rows = panel_outputs(shape, p);
    if (shape.kind == WeightKind::f32) {
      pack_panel(static_cast<const float*>(weight) + start, rows, shape.inputs, 1,
                 reinterpret_cast<float*>(out));
    } else {
      pack_panel(static_cast<const uint16_t*>(weight) + start, rows, shape.inputs,
                 shape.kind == WeightKind::bf16 ? 2 : 1, reinterpret_cast<uint16_t*>(out));
    }
  });
}

PackedWeight::PackedWeight(const PackedShape& shape, const uint32_t* codes, const void* scales,
                           const void* biases)
    : shape(shape), panels(shape.panel_bytes() * shape.num_panels()) {
  parallel_for(shape.num_panels(), [&](int p) {
    for (int g = 0; g < shape.num_groups(); ++g)
      pack_group(shape, p, g, codes, scales, biases,
                 panels.data() + shape.panel_bytes() * p + shape.block_bytes() * g);
  });
}

void PackedWeight::unpack_dense(void* weight) const {
  parallel_for(shape.num_panels(), [&](int p) {
    const std::size_t start = static_cast<std::size_t>(p) * kPanel * shape.inputs;
    const int rows = panel_outputs(shape, p);
    if (shape.kind == WeightKind::f32) {
      unpack_panel(reinterpret_cast<const float*>(panel(p)), rows, shape.inputs, 1,
                   static_cast<float*>(weight) + start);
    } else {
      unpack_panel(reinterpret_cast<const uint16_t*>(panel(p)), rows, shape.inputs,
                   shape.kind == WeightKind::bf16 ? 2 : 1, static_cast<uint16_t*>(weight) + start);
    }
  });
}

void PackedWeight::unpack_affine(uint32_t* codes, void* scales, void* biases) const {
  const int words = shape.group * shape.bits() / 32;
  const std::size_t size = float_size(shape.scale_type);
  parallel_for(shape.outputs, [&](int output) {
    const int n = output % kPanel;
    for (int g = 0; g < shape.num_groups(); ++g) {
      const uint8_t* block = panel(output / kPanel) + shape.block_bytes() * g;
      const std::size_t at = static_cast<std::size_t>(output) * shape.num_groups() + g;
      for (int i = 0; i < words; ++i) {
        uint32_t word;
        std::memcpy(&word, block + (static_cast<std::size_t>(i) * kPanel + n) * 4, 4);
        codes[at * words + i] = mlx_word(word, shape.bits());
      }
      const uint8_t* scale_row = block + shape.code_bytes();
      std::memcpy(static_cast<uint8_t*>(scales) + at * size, scale_row + n * size, size);
      std::memcpy(static_cast<uint8_t*>(biases) + at * size, scale_row + (kPanel + n) * size, size);
    }
  });
}

void PackedWeight::row(int output, float* out) const {
  if (shape.quantized()) return quantized_row(*this, output, out);
  const uint8_t* base = panel(output / kPanel);
  const int n = output % kPanel;
  for (int k = 0; k < shape.inputs; ++k) {
    const std::size_t at = static_cast<std::size_t>(k) * kPanel + n;
    switch (shape.kind) {
      case WeightKind::f32: out[k] = reinterpret_cast<const float*>(base)[at]; break;
      case WeightKind::f16: out[k] = f16_to_float(reinterpret_cast<const f16_t*>(base)[at]); break;
      default: {
        const std::size_t pair = (static_cast<std::size_t>(k / 2) * kPanel + n) * 2 + k % 2;
        out[k] = bf16_to_float(reinterpret_cast<const bf16_t*>(base)[pair]);
      }
    }
  }
}

}  // namespace octavo
