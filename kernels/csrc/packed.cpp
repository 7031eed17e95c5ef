#include "packed.h"

#include "threads.h"

namespace octavo {
namespace {

constexpr int kMaxGroup = 128;  // inputs, hence also bytes of codes

// Rows of the panel that exist.
int panel_outputs(const PackedShape& shape, int panel) {
  const int left = shape.outputs - panel * kPanel;
  return left < kPanel ? left : kPanel;
}

// Place element (n, k) of a row-major matrix at [k][n] of its panel; `inputs` counts T, which may be a
// pair of values. A line of each row at a time, so that its reads and the writes stay in cache. No prefetcher
// follows as many streams as a panel has rows, so the lines after the next are asked for.
template <class T>
void pack_panel(const T* rows, int num_rows, int inputs, T* panel) {
  constexpr int kLine = 64 / sizeof(T);
  for (int start = 0; start < inputs; start += kLine) {
    const int end = start + kLine < inputs ? start + kLine : inputs;
    for (int n = 0; n < num_rows; ++n) {
      const T* const row = rows + static_cast<std::size_t>(n) * inputs;
      __builtin_prefetch(row + (start + 2 * kLine < inputs ? start + 2 * kLine : start));
      for (int k = start; k < end; ++k) panel[static_cast<std::size_t>(k) * kPanel + n] = row[k];
    }
  }
}

// The same for bf16 pairs when the number of inputs is odd, so that rows do not start at a pair.
void pack_odd_pairs(const bf16_t* rows, int num_rows, int inputs, bf16_t* panel) {
  for (int n = 0; n < num_rows; ++n)
    for (int k = 0; k < inputs; ++k)
      panel[(static_cast<std::size_t>(k / 2) * kPanel + n) * 2 + k % 2] =
          rows[static_cast<std::size_t>(n) * inputs + k];
}

// Four consecutive codes as four bytes, the first in the lowest.
uint32_t spread(uint32_t codes, int bits) {
  const uint32_t mask = (1u << bits) - 1;
  return (codes & mask) | (codes >> bits & mask) << 8 | (codes >> 2 * bits & mask) << 16 |
         (codes >> 3 * bits & mask) << 24;
}

// The inverse of spread.
uint32_t gather(uint32_t quad, int bits) {
  const uint32_t mask = (1u << bits) - 1;
  return (quad & mask) | (quad >> 8 & mask) << bits | (quad >> 16 & mask) << 2 * bits |
         (quad >> 24 & mask) << 3 * bits;
}

// One plane of a group's codes: `bits` of each, from bit `shift` of a code on.
struct Plane {
  uint8_t* words;  // [group bits / 32][64] words
  int bits;
  int shift;

  uint32_t mask() const { return ((1u << bits) - 1) * 0x01010101u; }
  uint8_t* word(int quad, int n) const {
    return words + (static_cast<std::size_t>(quad * bits / 8) * kPanel + n) * 4;
  }
  // Quad i holds the codes of inputs 4 i to 4 i + 3.
  void put(int i, int n, uint32_t quad) const {
    uint32_t word;
    std::memcpy(&word, this->word(i, n), 4);
    word |= (quad >> shift & mask()) << i * bits % 8;
    std::memcpy(this->word(i, n), &word, 4);
  }
  uint32_t get(int i, int n) const {
    uint32_t word;
    std::memcpy(&word, this->word(i, n), 4);
    return (word >> i * bits % 8 & mask()) << shift;
  }
};

// Codes of one group of a panel; a code of 8, 4, 2 or 1 bits has no second plane.
struct Codes {
  Plane low, high;

  Codes(const PackedShape& shape, uint8_t* block)
      : low{block, shape.low_bits(), 0},
        high{block + PackedShape::plane_bytes(shape.group, shape.low_bits()), shape.bits - shape.low_bits(),
             shape.low_bits()} {}

  void put(int i, int n, uint32_t quad) const {
    low.put(i, n, quad);
    if (high.bits > 0) high.put(i, n, quad);
  }
  uint32_t get(int i, int n) const { return low.get(i, n) | (high.bits > 0 ? high.get(i, n) : 0); }
};

template <class T>
void unpack_panel(const T* panel, int num_rows, int inputs, int run, T* rows) {
  for (int n = 0; n < num_rows; ++n)
    for (int k = 0; k < inputs; ++k)
      rows[static_cast<std::size_t>(n) * inputs + k] =
          panel[(static_cast<std::size_t>(k / run) * kPanel + n) * run + k % run];
}

// Where MLX has the codes and scales of one output's group.
struct Place {
  std::size_t code_byte, scale;

  Place(const PackedShape& shape, int output, int group)
      : code_byte((static_cast<std::size_t>(output) * shape.num_groups() + group) * shape.group * shape.bits /
                  8),
        scale(static_cast<std::size_t>(output) * shape.num_groups() + group) {}
};

std::size_t scale_size(const PackedShape& shape) { return shape.affine() ? float_size(shape.scale_type) : 1; }

void pack_group(const PackedShape& shape, int panel, int group, const void* codes, const void* scales,
                const void* biases, uint8_t* block) {
  const std::size_t size = scale_size(shape), bytes = static_cast<std::size_t>(shape.group) * shape.bits / 8;
  const Codes planes(shape, block);
  uint8_t stream[kMaxGroup + 4] = {};  // of bits, with room to read four bytes anywhere
  uint8_t* scale_row = block + shape.code_bytes();
  for (int n = 0; n < panel_outputs(shape, panel); ++n) {
    const Place from(shape, panel * kPanel + n, group);
    std::memcpy(stream, static_cast<const uint8_t*>(codes) + from.code_byte, bytes);
    for (int i = 0; i < shape.group / 4; ++i) {
      const int bit = 4 * shape.bits * i;
      uint32_t window;
      std::memcpy(&window, stream + bit / 8, 4);
      planes.put(i, n, spread(window >> bit % 8, shape.bits));
    }
    std::memcpy(scale_row + n * size, static_cast<const uint8_t*>(scales) + from.scale * size, size);
    if (shape.affine())
      std::memcpy(scale_row + (kPanel + n) * size, static_cast<const uint8_t*>(biases) + from.scale * size,
                  size);
  }
}

void unpack_group(const PackedWeight& weight, int output, int group, void* codes, void* scales,
                  void* biases) {
  const PackedShape& shape = weight.shape;
  const std::size_t size = scale_size(shape), bytes = static_cast<std::size_t>(shape.group) * shape.bits / 8;
  uint8_t* block =
      weight.panels.data() + shape.panel_bytes() * (output / kPanel) + shape.block_bytes() * group;
  const Codes planes(shape, block);
  const Place to(shape, output, group);
  const int n = output % kPanel;
  uint8_t stream[kMaxGroup + 4] = {};
  for (int i = 0; i < shape.group / 4; ++i) {
    const int bit = 4 * shape.bits * i;
    uint32_t window;
    std::memcpy(&window, stream + bit / 8, 4);
    window |= gather(planes.get(i, n), shape.bits) << bit % 8;
    std::memcpy(stream + bit / 8, &window, 4);
  }
  std::memcpy(static_cast<uint8_t*>(codes) + to.code_byte, stream, bytes);
  const uint8_t* scale_row = block + shape.code_bytes();
  std::memcpy(static_cast<uint8_t*>(scales) + to.scale * size, scale_row + n * size, size);
  if (shape.affine())
    std::memcpy(static_cast<uint8_t*>(biases) + to.scale * size, scale_row + (kPanel + n) * size, size);
}

void quantized_row(const PackedWeight& weight, int output, float* out) {
  const PackedShape& shape = weight.shape;
  const int n = output % kPanel;
  for (int g = 0; g < shape.num_groups(); ++g, out += shape.group) {
    uint8_t* block = weight.panels.data() + shape.panel_bytes() * (output / kPanel) + shape.block_bytes() * g;
    const Codes planes(shape, block);
    const uint8_t* parameters = block + shape.code_bytes();
    float scale, bias = 0;
    if (shape.affine()) {
      load_floats(parameters, shape.scale_type, n, 1, &scale);
      load_floats(parameters, shape.scale_type, kPanel + n, 1, &bias);
    } else {
      scale = fp4_scale(shape.kind == WeightKind::mxfp4, parameters[n]);
    }
    for (int i = 0; i < shape.group / 4; ++i) {
      const uint32_t quad = planes.get(i, n);
      for (int j = 0; j < 4; ++j) {
        const uint32_t code = quad >> 8 * j & 255;
        out[4 * i + j] =
            shape.affine() ? scale * static_cast<float>(code) + bias : scale * e2m1_to_float(code);
      }
    }
  }
}

}  // namespace

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

void PackedWeight::unpack_quantized(uint32_t* codes, void* scales, void* biases) const {
  parallel_for(shape.outputs, [&](int output) {
    for (int g = 0; g < shape.num_groups(); ++g) unpack_group(*this, output, g, codes, scales, biases);
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
