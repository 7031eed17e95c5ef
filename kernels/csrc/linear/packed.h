// A weight matrix W [outputs, inputs], packed once at load into panels of 64 outputs.
//
// One layout serves every instruction set and every batch size. In a panel, inputs are the outer dimension,
// so that a kernel reads its memory in order:
//
//   bf16        [inputs / 2][64][2]  pairs of adjacent inputs, as VDPBF16PS and AMX tiles need them;
//               inputs padded with zeros to a multiple of 32
//   f16, f32    [inputs][64]
//   affine      a block per group of inputs: codes, then scales [64] and biases [64] in their original
//               float type; weight = scale * code + bias (MLX's affine format). See scales_last
//   mxfp4       a block per group of 32: codes (E2M1), then scales [64], E8M0
//   nvfp4       a block per group of 16: codes (E2M1), then scales [64], E4M3
//
// Codes are stored in planes of 8, 4, 2 or 1 bits. Codes of 6, 5 and 3 bits have two planes: one with the low
// 4, 4 or 2 bits, one with the other 2, 1 or 1 bits. A plane of p bits is [group p / 32][64] words, each with
// 32 / p inputs of one output: byte j holds inputs j, 4 + j, 8 + j, ... from its lowest bits up. So a shift
// and a mask yield four consecutive inputs as four bytes, for as many outputs as a register holds. Outputs
// past the last are zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/numeric.h"

namespace octavo {

constexpr int kPanel = 64;
constexpr int kFixedGroup = 128;  // inputs of a bf16 weight that share a fixed-point step

enum class WeightKind { bf16, f16, f32, affine, mxfp4, nvfp4 };

// Zeroed memory aligned to a cache line. Large buffers request huge pages, which saves a streaming kernel a
// page walk every 4 KiB.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  std::size_t mapped_;  // bytes mapped by the system at mapping_
  void* mapping_;
  uint8_t* data_;
};

// Zeroed memory of one weight. Small weights share buffers of many huge pages, because separate buffers would
// end in small pages, where prefetchers stop at the end of each page. A buffer is freed with its last weight.
class Slice {
 public:
  Slice() = default;
  explicit Slice(std::size_t bytes);

  uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_ = 0;
  std::shared_ptr<const Buffer> buffer_;
  uint8_t* data_ = nullptr;
};

struct PackedShape {
  WeightKind kind;
  Float scale_type;  // type of affine scales and biases, or of a dense weight
  int outputs;
  int inputs;
  int group = 0;  // inputs that share a scale; 0 for a dense weight
  int bits = 0;   // bits of a code; 0 for a dense weight
  // Whether blocks have only codes, and all scales and biases follow the last panel. Kernels that use no
  // scales then need not read them from memory together with the codes.
  bool scales_last = false;

  // Compares the matrices' shapes and formats, but not how they are laid out.
  bool operator==(const PackedShape& other) const {
    return kind == other.kind && scale_type == other.scale_type && outputs == other.outputs &&
           inputs == other.inputs && group == other.group && bits == other.bits;
  }

  bool quantized() const { return group > 0; }
  bool affine() const { return kind == WeightKind::affine; }
  int low_bits() const { return bits >= 4 && bits < 8 ? 4 : bits == 3 ? 2 : bits; }  // bits of plane 0
  int num_panels() const { return (outputs + kPanel - 1) / kPanel; }
  int padded_inputs() const { return kind == WeightKind::bf16 ? (inputs + 31) / 32 * 32 : inputs; }
  int num_groups() const { return inputs / group; }
  int fixed_groups() const { return (padded_inputs() + kFixedGroup - 1) / kFixedGroup; }
  // Returns the bytes of `count` inputs in a plane of `plane_bits` bits.
  static std::size_t plane_bytes(int count, int plane_bits) {
    return static_cast<std::size_t>(count) * kPanel * plane_bits / 8;
  }
  std::size_t code_bytes() const { return plane_bytes(group, bits); }
  // Returns the bytes of a group's scales and biases.
  std::size_t parameter_bytes() const { return affine() ? 2 * kPanel * float_size(scale_type) : kPanel; }
  // Returns the distance in bytes from one group's codes to the next group's.
  std::size_t block_bytes() const { return code_bytes() + (scales_last ? 0 : parameter_bytes()); }
  std::size_t panel_bytes() const {
    if (quantized()) return block_bytes() * num_groups();
    return static_cast<std::size_t>(padded_inputs()) * kPanel * (kind == WeightKind::f32 ? 4 : 2);
  }
  // Return the offsets of a group's codes, and of its scales and biases, in bytes from the first panel.
  std::size_t codes_at(int panel, int group) const { return panel_bytes() * panel + block_bytes() * group; }
  std::size_t parameters_at(int panel, int group) const {
    if (!scales_last) return codes_at(panel, group) + code_bytes();
    return panel_bytes() * num_panels() +
           parameter_bytes() * (static_cast<std::size_t>(panel) * num_groups() + group);
  }
  // Returns the bytes of all panels and of the data after them.
  std::size_t num_bytes() const {
    const std::size_t last = scales_last ? parameter_bytes() * num_groups() : 0;
    return (panel_bytes() + last) * num_panels();
  }
};

// Consecutive outputs of a row-major matrix.
struct MatrixRows {
  const void* data;
  int outputs;
};

// Quantized matrices in MLX's format: codes as uint32 [outputs, inputs * bits / 32], each row a stream of
// bits from the lowest up; scales and, if affine, biases [outputs, inputs / group].
struct QuantizedRows {
  std::vector<MatrixRows> codes, scales, biases;
};

struct PackedWeight {
  // Packs dense matrices of `shape.kind` as one weight; shape.outputs is the sum of their outputs.
  PackedWeight(const PackedShape& shape, const std::vector<MatrixRows>& parts);
  // Packs quantized matrices as one weight.
  PackedWeight(const PackedShape& shape, const QuantizedRows& parts);

  const uint8_t* panel(int index) const { return panels.data() + shape.panel_bytes() * index; }

  // For a quantized weight, return a group's codes in a panel, or its scales (then affine biases).
  const uint8_t* codes(int panel, int group) const { return panels.data() + shape.codes_at(panel, group); }
  const uint8_t* parameters(int panel, int group) const {
    return panels.data() + shape.parameters_at(panel, group);
  }

  // Returns the fixed-point steps of a panel of a bf16 weight, [groups][64]: powers of two, as exponents of
  // float32. Null if kernels may not use fixed point: on levels other than AVX2, or if weights are not
  // finite.
  const uint8_t* fixed_steps(int index) const {
    return steps.empty() ? nullptr
                         : steps.data() + static_cast<std::size_t>(shape.fixed_groups()) * kPanel * index;
  }
  // Whether every weight of an output is an integer in [-128, 127] times one scale of that output, so that
  // kernels may add up all inputs in integers. True for 8-bit codes with biases of -128 times the scale
  // (vLLM's W8A8), and for 4-bit codes whose group scales are small multiples of the output's scale and whose
  // biases are multiples of the group scales ("W4A8", as in QServe).
  bool per_channel() const { return !channel_scales.empty(); }
  // Returns k and 128 - k z of each group of 4-bit per-channel codes in a panel, [groups][2][64]. A code q
  // stands for k (q - z) times the channel's scale. Null for 8 bits.
  const uint8_t* factors(int index) const {
    return factor_bytes.size() == 0
               ? nullptr
               : factor_bytes.data() + std::size_t{2} * kPanel * shape.num_groups() * index;
  }
  std::size_t num_bytes() const {
    return panels.size() + steps.size() + factor_bytes.size() +
           sizeof(float) * (bias.size() + channel_scales.size());
  }
  // Returns the bytes that only exact products read.
  std::size_t num_unread_bytes() const {
    return shape.scales_last ? shape.parameter_bytes() * shape.num_groups() * shape.num_panels() : 0;
  }

  // Writes one row of W as float32 [inputs].
  void row(int output, float* out) const;

  // Restore the packed matrices as one, bit for bit except for NaNs. Buffers have the layout that the
  // constructors take.
  void unpack_dense(void* weight) const;
  void unpack_quantized(uint32_t* codes, void* scales, void* biases) const;

  PackedShape shape;
  Slice panels;
  std::vector<uint8_t> steps;         // see fixed_steps
  std::vector<float> bias;            // added to the result; padded to whole panels, or empty
  std::vector<float> channel_scales;  // see per_channel; padded to whole panels, or empty
  Slice factor_bytes;                 // see factors

 private:
  void find_channels(const QuantizedRows& parts);
};

}  // namespace octavo
