#include "linear/packed.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "linear/channel.h"
#include "runtime/dispatch.h"
#include "runtime/threads.h"

namespace octavo {
namespace {

constexpr int kMaxGroup = 128;  // most inputs per group, hence also most bytes of its codes

// The 64 rows of a matrix (outputs) that form one panel.
struct PanelRows {
  const void* rows[kPanel];
  int count = 0;

  // Takes outputs [first, first + kPanel) of matrices that form one weight.
  PanelRows(const std::vector<MatrixRows>& parts, int first, std::size_t row_bytes) {
    for (const MatrixRows& part : parts) {
      for (int n = first; n >= 0 && n < part.outputs && count < kPanel; ++n, ++first)
        rows[count++] = static_cast<const uint8_t*>(part.data) + row_bytes * n;
      first -= part.outputs;
    }
  }

  template <class T>
  const T* row(int n) const {
    return static_cast<const T*>(rows[n]);
  }
};

using Four = uint32_t __attribute__((vector_size(16), aligned(4)));

Four load_four(const uint32_t* from) {
  Four words;
  std::memcpy(&words, from, 16);
  return words;
}

// Transposes a 4 by 4 block of words: rows [n, n + 4) become four columns of a panel.
void transpose_four(Four a, Four b, Four c, Four d, int n, uint32_t* columns) {
  const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Four ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7), cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const Four turned[4] = {
      __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
      __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5), __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) std::memcpy(columns + static_cast<std::size_t>(i) * kPanel + n, &turned[i], 16);
}

// Writes element (n, k) of the rows to [k][n] of their panel; `inputs` counts elements of type T, which may
// be pairs of values. It reads one cache line of each row at a time, so that reads and writes stay in cache,
// and prefetches later lines, because hardware prefetchers cannot follow as many streams as a panel has rows.
template <class T>
void pack_panel(const PanelRows& from, int inputs, T* panel) {
  constexpr int kLine = 64 / sizeof(T);
  for (int start = 0; start < inputs; start += kLine) {
    const int end = start + kLine < inputs ? start + kLine : inputs;
    for (int n = 0; n < from.count; ++n) {
      const T* const row = from.row<T>(n);
      __builtin_prefetch(row + (start + 2 * kLine < inputs ? start + 2 * kLine : start));
    }
    int n = 0;
    if constexpr (sizeof(T) == 4) {
      for (; end - start == kLine && n + 4 <= from.count; n += 4)
        for (int k = start; k < end; k += 4)
          transpose_four(load_four(from.row<T>(n) + k), load_four(from.row<T>(n + 1) + k),
                         load_four(from.row<T>(n + 2) + k), load_four(from.row<T>(n + 3) + k), n,
                         panel + static_cast<std::size_t>(k) * kPanel);
    }
    for (; n < from.count; ++n)
      for (int k = start; k < end; ++k) panel[static_cast<std::size_t>(k) * kPanel + n] = from.row<T>(n)[k];
  }
}

// Packs bf16 pairs like pack_panel for an odd number of inputs, where every other row begins inside a pair.
void pack_odd_pairs(const PanelRows& from, int inputs, bf16_t* panel) {
  for (int n = 0; n < from.count; ++n)
    for (int k = 0; k < inputs; ++k)
      panel[(static_cast<std::size_t>(k / 2) * kPanel + n) * 2 + k % 2] = from.row<bf16_t>(n)[k];
}

// Spreads four consecutive codes to four bytes, the first code to the lowest byte.
uint32_t spread(uint32_t codes, int bits) {
  const uint32_t mask = (1u << bits) - 1;
  return (codes & mask) | (codes >> bits & mask) << 8 | (codes >> 2 * bits & mask) << 16 |
         (codes >> 3 * bits & mask) << 24;
}

// Packs four bytes as consecutive codes again.
uint32_t gather(uint32_t quad, int bits) {
  const uint32_t mask = (1u << bits) - 1;
  return (quad & mask) | (quad >> 8 & mask) << bits | (quad >> 16 & mask) << 2 * bits |
         (quad >> 24 & mask) << 3 * bits;
}

// A bit plane of a group's codes: bits [shift, shift + bits) of each code.
struct Plane {
  uint8_t* words;  // [group bits / 32][64] words
  int bits;
  int shift;

  uint32_t mask() const { return ((1u << bits) - 1) * 0x01010101u; }
  uint8_t* word(int quad, int n) const {
    return words + (static_cast<std::size_t>(quad * bits / 8) * kPanel + n) * 4;
  }
  // Writes quad i of output n: four bytes, which hold the codes of inputs 4 i to 4 i + 3.
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

// The planes of one group's codes in a panel; codes of 8, 4, 2 or 1 bits have only the low plane.
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

// Where an output's group begins in MLX's codes and scales.
struct Place {
  std::size_t code_byte, scale;

  Place(const PackedShape& shape, int output, int group)
      : code_byte((static_cast<std::size_t>(output) * shape.num_groups() + group) * shape.group * shape.bits /
                  8),
        scale(static_cast<std::size_t>(output) * shape.num_groups() + group) {}
};

std::size_t scale_size(const PackedShape& shape) { return shape.affine() ? float_size(shape.scale_type) : 1; }

// Packs the codes of one group, for any number of bits per code.
void pack_any_codes(const PackedShape& shape, const PanelRows& from, int group, uint8_t* block) {
  const std::size_t bytes = static_cast<std::size_t>(shape.group) * shape.bits / 8;
  const Codes planes(shape, block);
  uint8_t stream[kMaxGroup + 4] = {};  // bits of the codes; four bytes may be read from any of them
  for (int n = 0; n < from.count; ++n) {
    std::memcpy(stream, from.row<uint8_t>(n) + bytes * group, bytes);
    for (int i = 0; i < shape.group / 4; ++i) {
      const int bit = 4 * shape.bits * i;
      uint32_t window;
      std::memcpy(&window, stream + bit / 8, 4);
      planes.put(i, n, spread(window >> bit % 8, shape.bits));
    }
  }
}

// Converts words of MLX's codes to words of a plane; with 4 bits, byte j gets codes j and j + 4.
template <int kBits, class T>
T plane_words(T words) {
  static_assert(kBits == 8 || kBits == 4);
  if constexpr (kBits == 8) return words;
  words = (words & 0xff0000ff) | (words & 0x0000ff00) << 8 | (words >> 8 & 0x0000ff00);
  return (words & 0xf00ff00f) | (words & 0x00f000f0) << 4 | (words >> 4 & 0x00f000f0);
}

// Packs the codes of one group if a word of MLX's codes has the inputs of one word of the plane.
template <int kBits>
void pack_codes(const PackedShape& shape, const PanelRows& from, int group, uint32_t* block) {
  const int words = shape.group * kBits / 32, first = words * group, all = words * shape.num_groups();
  constexpr int kAhead = 32;  // prefetch distance in words, see pack_panel
  for (int n = 0; n < from.count; ++n)
    __builtin_prefetch(from.row<uint32_t>(n) + (first + kAhead < all ? first + kAhead : first));
  const auto four = [&](int n, int k) {
    return plane_words<kBits>(load_four(from.row<uint32_t>(n) + first + k));
  };
  int n = 0;
  for (; words % 4 == 0 && n + 4 <= from.count; n += 4)
    for (int k = 0; k < words; k += 4)
      transpose_four(four(n, k), four(n + 1, k), four(n + 2, k), four(n + 3, k), n, block + k * kPanel);
  for (; n < from.count; ++n)
    for (int k = 0; k < words; ++k)
      block[k * kPanel + n] = plane_words<kBits>(from.row<uint32_t>(n)[first + k]);
}

void pack_codes(const PackedShape& shape, const PanelRows& from, int group, uint8_t* block) {
  if (shape.bits == 8) pack_codes<8>(shape, from, group, reinterpret_cast<uint32_t*>(block));
  else if (shape.bits == 4) pack_codes<4>(shape, from, group, reinterpret_cast<uint32_t*>(block));
  else pack_any_codes(shape, from, group, block);
}

// Packs the scales or biases of one group.
void pack_scales(const PackedShape& shape, const PanelRows& from, int group, uint8_t* to) {
  const auto pack = [&](auto* scales) {
    using T = std::remove_pointer_t<decltype(scales)>;
    for (int n = 0; n < from.count; ++n) scales[n] = from.row<T>(n)[group];
  };
  if (!shape.affine()) pack(to);
  else if (shape.scale_type == Float::f32) pack(reinterpret_cast<float*>(to));
  else pack(reinterpret_cast<uint16_t*>(to));
}

void unpack_group(const PackedWeight& weight, int output, int group, void* codes, void* scales,
                  void* biases) {
  const PackedShape& shape = weight.shape;
  const std::size_t size = scale_size(shape), bytes = static_cast<std::size_t>(shape.group) * shape.bits / 8;
  const Codes planes(shape, weight.panels.data() + shape.codes_at(output / kPanel, group));
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
  const uint8_t* scale_row = weight.parameters(output / kPanel, group);
  std::memcpy(static_cast<uint8_t*>(scales) + to.scale * size, scale_row + n * size, size);
  if (shape.affine())
    std::memcpy(static_cast<uint8_t*>(biases) + to.scale * size, scale_row + (kPanel + n) * size, size);
}

void quantized_row(const PackedWeight& weight, int output, float* out) {
  const PackedShape& shape = weight.shape;
  const int n = output % kPanel;
  for (int g = 0; g < shape.num_groups(); ++g, out += shape.group) {
    const Codes planes(shape, weight.panels.data() + shape.codes_at(output / kPanel, g));
    const uint8_t* parameters = weight.parameters(output / kPanel, g);
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
        out[4 * i + j] = shape.affine() ? scale * static_cast<float>(code) + bias : scale * kE2M1[code & 15];
      }
    }
  }
}

// Packs a panel of a dense matrix.
void pack_dense_panel(const PackedShape& shape, const PanelRows& from, uint8_t* panel) {
  const int inputs = shape.inputs;
  if (shape.kind == WeightKind::f32) {
    pack_panel(from, inputs, reinterpret_cast<uint32_t*>(panel));
  } else if (shape.kind == WeightKind::f16) {
    pack_panel(from, inputs, reinterpret_cast<uint16_t*>(panel));
  } else if (inputs % 2 == 0) {
    pack_panel(from, inputs / 2, reinterpret_cast<uint32_t*>(panel));
  } else {
    pack_odd_pairs(from, inputs, reinterpret_cast<bf16_t*>(panel));
  }
}

// Whether the instruction set in use multiplies such weights in fixed point.
bool has_fixed_point(const PackedShape& shape) {
  return shape.kind == WeightKind::bf16 && isa() == Isa::avx2;
}

// Chooses a packed panel's fixed-point steps (linear/fixed_avx2.cpp); returns false if its weights
// allow none.
bool choose_steps(const PackedShape& shape, const uint8_t* panel, uint8_t* exponents) {
  const int inputs = shape.padded_inputs();
  for (int k = 0; k < inputs; k += kFixedGroup, exponents += kPanel) {
    float sum[kPanel] = {}, largest[kPanel] = {};  // of the magnitudes of each output
    for (int i = std::min(inputs - k, kFixedGroup) / 2; i > 0; --i, panel += 4 * kPanel) {
      uint32_t pairs[kPanel];
      std::memcpy(pairs, panel, sizeof(pairs));
      for (int n = 0; n < kPanel; ++n) {
        const float odd = as_float(pairs[n] & 0x7fff0000), even = as_float(pairs[n] << 16 & 0x7fffffff);
        sum[n] += odd + even;
        largest[n] = std::max(largest[n], std::max(odd, even));
      }
    }
    for (int n = 0; n < kPanel; ++n) {
      if (!(sum[n] < 0x1p110f)) return false;
      // Limits the sum of codes to less than 2^17, although each of 128 codes is rounded by up to a half and
      // the sum of magnitudes by a little.
      const float most = std::min(130944.0f / sum[n], 32767.0f / largest[n]);
      const int factor = std::min<int>(as_bits(most) >> 23, 253);  // float32 exponent; zeros give inf
      exponents[n] = static_cast<uint8_t>(254 - factor);
    }
  }
  return true;
}

}  // namespace

PackedWeight::PackedWeight(const PackedShape& shape, const std::vector<MatrixRows>& parts)
    : shape(shape), panels(shape.panel_bytes() * shape.num_panels()) {
  const std::size_t row_bytes = shape.inputs * float_size(shape.scale_type);
  const std::size_t panel_steps = static_cast<std::size_t>(shape.fixed_groups()) * kPanel;
  if (has_fixed_point(shape)) steps.resize(panel_steps * shape.num_panels());
  std::atomic<bool> in_range = true;
  parallel_for(shape.num_panels(), [&](int p) {
    const PanelRows from(parts, p * kPanel, row_bytes);
    uint8_t* out = panels.data() + shape.panel_bytes() * p;
    pack_dense_panel(shape, from, out);
    if (!steps.empty() && !choose_steps(shape, out, steps.data() + panel_steps * p)) in_range = false;
  });
  if (!in_range) steps = {};
}

PackedWeight::PackedWeight(const PackedShape& shape, const QuantizedRows& parts)
    : shape(shape), panels(shape.num_bytes()) {
  find_channels(parts);
  PackedShape& layout = this->shape;
  layout.scales_last = per_channel() && isa() >= Isa::avx512;  // lower instruction sets use the group scales
  const std::size_t row_bytes = static_cast<std::size_t>(shape.inputs) * shape.bits / 8,
                    scale_bytes = scale_size(shape) * shape.num_groups();
  parallel_for(shape.num_panels(), [&](int p) {
    const PanelRows of_codes(parts.codes, p * kPanel, row_bytes),
        of_scales(parts.scales, p * kPanel, scale_bytes), of_biases(parts.biases, p * kPanel, scale_bytes);
    for (int g = 0; g < shape.num_groups(); ++g) {
      pack_codes(layout, of_codes, g, panels.data() + layout.codes_at(p, g));
      uint8_t* const parameters = panels.data() + layout.parameters_at(p, g);
      pack_scales(layout, of_scales, g, parameters);
      if (layout.affine()) pack_scales(layout, of_biases, g, parameters + kPanel * scale_size(layout));
    }
  });
}

void PackedWeight::find_channels(const QuantizedRows& parts) {
  constexpr int kMostInputs = INT32_MAX / (255 * 127);  // most inputs whose products' sum fits into 32 bits
  if (!shape.affine() || (shape.bits != 8 && shape.bits != 4) || shape.inputs > kMostInputs) return;
  const int groups = shape.num_groups();
  const std::size_t row_bytes = scale_size(shape) * groups;
  const auto find = [&](const void* of_scales, const void* of_biases, uint8_t*& factors) {
    float* const values = static_cast<float*>(thread_scratch((2 * sizeof(float) + 2) * groups));
    load_floats(of_scales, shape.scale_type, 0, groups, values);
    load_floats(of_biases, shape.scale_type, 0, groups, values + groups);
    factors = reinterpret_cast<uint8_t*>(values + 2 * groups);
    return find_channel(shape.bits, values, values + groups, groups, factors);
  };
  uint8_t* first;  // factors of output 0, which is tried first: most weights are not per-channel
  if (std::isnan(find(parts.scales[0].data, parts.biases[0].data, first))) return;
  std::vector<float> found(static_cast<std::size_t>(shape.num_panels()) * kPanel);
  const std::size_t panel_factors = shape.bits == 4 ? std::size_t{2} * kPanel * groups : 0;
  const Slice bytes = panel_factors > 0 ? Slice(panel_factors * shape.num_panels()) : Slice();
  std::atomic<bool> all = true;
  parallel_for(shape.num_panels(), [&](int p) {
    const PanelRows of_scales(parts.scales, p * kPanel, row_bytes),
        of_biases(parts.biases, p * kPanel, row_bytes);
    for (int n = 0; n < of_scales.count && all; ++n) {
      uint8_t* factors;
      const float unit = find(of_scales.rows[n], of_biases.rows[n], factors);
      if (std::isnan(unit)) all = false;
      found[p * kPanel + n] = unit;
      for (int i = 0; i < 2 * groups && panel_factors > 0; ++i)
        bytes.data()[panel_factors * p + i * kPanel + n] = factors[i];
    }
  });
  if (!all) return;
  channel_scales = std::move(found);
  factor_bytes = bytes;
}

void PackedWeight::unpack_dense(void* weight) const {
  parallel_for(shape.outputs, [&](int output) {
    float* const values = static_cast<float*>(thread_scratch(sizeof(float) * shape.inputs));
    row(output, values);
    store_floats(weight, shape.scale_type, static_cast<std::size_t>(output) * shape.inputs, shape.inputs,
                 values);
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
