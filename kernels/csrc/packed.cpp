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

// Place element (n, k) of a row-major matrix at [k][n] of its panel; `inputs` counts T, which may be a
// pair of values. A line of each row at a time, so that its reads and the writes stay in cache.
template <class T>
void pack_panel(const T* rows, int num_rows, int inputs, T* panel) {
  constexpr int kLine = 64 / sizeof(T);
  for (int start = 0; start < inputs; start += kLine) {
    const int end = start + kLine < inputs ? start + kLine : inputs;
    for (int n = 0; n < num_rows; ++n)
      for (int k = start; k < end; ++k)
        panel[static_cast<std::size_t>(k) * kPanel + n] = rows[static_cast<std::size_t>(n) * inputs + k];
  }
}

// The same for bf16 pairs when the number of inputs is odd, so that rows do not start at a pair.
void pack_odd_pairs(const bf16_t* rows, int num_rows, int inputs, bf16_t* panel) {
  for (int n = 0; n < num_rows; ++n)
    for (int k = 0; k < inputs; ++k)
      panel[(static_cast<std::size_t>(k / 2) * kPanel + n) * 2 + k % 2] =
          rows[static_cast<std::size_t>(n) * inputs + k];
}

// Four bits each, spread to the low halves of four bytes.
uint32_t spread_nibbles(uint32_t codes) {
  codes = (codes | codes << 8) & 0x00ff00ff;
  return (codes | codes << 4) & 0x0f0f0f0f;
}

// MLX's word holds eight 4-bit codes, the first in the lowest bits; ours has input j in the low and
// input 4 + j in the high half of byte j. Words of bytes stay as they are.
uint32_t panel_word(uint32_t codes, int bits) {
  if (bits == 8) return codes;
  return spread_nibbles(codes & 0xffff) | spread_nibbles(codes >> 16) << 4;
}

template <class T>
void unpack_panel(const T* panel, int num_rows, int inputs, int run, T* rows) {
  for (int n = 0; n < num_rows; ++n)
    for (int k = 0; k < inputs; ++k)
      rows[static_cast<std::size_t>(n) * inputs + k] =
          panel[(static_cast<std::size_t>(k / run) * kPanel + n) * run + k % run];
}

// The inverse of panel_word.
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
      const uint32_t word = panel_word(row[i], shape.bits());
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

#if defined(__linux__)

// Fresh pages from the system are zero, and may be huge ones from the start.
Buffer::Buffer(std::size_t bytes) : size_(bytes), mapped_(bytes + kHugePage) {
  void* start = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) throw std::bad_alloc();
  mapping_ = start;
  const std::size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(start) + alignment - 1) & ~(alignment - 1));
  madvise(data_, bytes, MADV_HUGEPAGE);  // advice: may be ignored
}

Buffer::~Buffer() { munmap(mapping_, mapped_); }

#else

Buffer::Buffer(std::size_t bytes) : size_(bytes), mapped_((bytes + 64) / 64 * 64) {
  mapping_ = std::aligned_alloc(64, mapped_);
  if (mapping_ == nullptr) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(mapping_);
  std::memset(data_, 0, mapped_);
}

Buffer::~Buffer() { std::free(mapping_); }

#endif

PackedWeight::PackedWeight(const PackedShape& shape, const void* weight)
    : shape(shape), panels(shape.panel_bytes() * shape.num_panels()) {
  parallel_for(shape.num_panels(), [&](int p) {
    uint8_t* out = panels.data() + shape.panel_bytes() * p;
    const std::size_t start = static_cast<std::size_t>(p) * kPanel * shape.inputs;
    const int rows = panel_outputs(shape, p), inputs = shape.inputs;
    const uint16_t* halves = static_cast<const uint16_t*>(weight) + start;
    if (shape.kind == WeightKind::f32) {
      pack_panel(static_cast<const uint32_t*>(weight) + start, rows, inputs,
                 reinterpret_cast<uint32_t*>(out));
    } else if (shape.kind == WeightKind::f16) {
      pack_panel(halves, rows, inputs, reinterpret_cast<uint16_t*>(out));
    } else if (inputs % 2 == 0) {
      pack_panel(reinterpret_cast<const uint32_t*>(halves), rows, inputs / 2,
                 reinterpret_cast<uint32_t*>(out));
    } else {
      pack_odd_pairs(halves, rows, inputs, reinterpret_cast<bf16_t*>(out));
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
