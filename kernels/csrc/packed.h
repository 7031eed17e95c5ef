// A weight matrix W [outputs, inputs], packed once at load into panels of 64 outputs.
//
// One layout serves every instruction set and every batch size. Inside a panel the inputs advance
// slowest, so that a kernel reads it front to back exactly once:
//
//   bf16        [inputs / 2][64][2]  pairs of inputs side by side: what VDPBF16PS and AMX tiles want;
//               inputs padded with zeros to a multiple of 32
//   f16, f32    [inputs][64]
//   q8          per group of inputs a block: codes [group / 4][64][4] bytes, then scales and biases
//   q4          per group a block: codes [group / 8][64][4] bytes, byte j of eight inputs holding
//               input j in its low and input 4 + j in its high half; then scales and biases
//
// q8 and q4 are MLX's affine formats: weight = scale * code + bias, one scale and one bias per output
// and group, both in the float type they came in, scales [64] then biases [64].
// Outputs past the last are zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "numeric.h"

namespace octavo {

constexpr int kPanel = 64;

enum class WeightKind { bf16, f16, f32, q8, q4 };

// Zeroed memory aligned to a cache line; large ones ask for huge pages, which spares a streaming
// kernel a page walk every 4 KiB.
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
  std::size_t mapped_;  // bytes got from the system, starting at mapping_
  void* mapping_;
  uint8_t* data_;
};

struct PackedShape {
  WeightKind kind;
  Float scale_type;  // of q8 and q4
  int outputs;
  int inputs;
  int group;  // of q8 and q4: inputs that share a scale; 0 otherwise

  bool quantized() const { return kind == WeightKind::q8 || kind == WeightKind::q4; }
  int bits() const { return kind == WeightKind::q4 ? 4 : 8; }
  int num_panels() const { return (outputs + kPanel - 1) / kPanel; }
  int padded_inputs() const { return kind == WeightKind::bf16 ? (inputs + 31) / 32 * 32 : inputs; }
  int num_groups() const { return inputs / group; }
  std::size_t code_bytes() const { return static_cast<std::size_t>(group) * kPanel * bits() / 8; }
  std::size_t block_bytes() const { return code_bytes() + 2 * kPanel * float_size(scale_type); }
  std::size_t panel_bytes() const {
    if (quantized()) return block_bytes() * num_groups();
    return static_cast<std::size_t>(padded_inputs()) * kPanel * (kind == WeightKind::f32 ? 4 : 2);
  }
};

struct PackedWeight {
  // Pack a dense row-major matrix of `shape.kind`.
  PackedWeight(const PackedShape& shape, const void* weight);
  // Pack MLX's affine format: codes as uint32 [outputs, inputs * bits / 32], scales and biases
  // [outputs, inputs / group] in `shape.scale_type`.
  PackedWeight(const PackedShape& shape, const uint32_t* codes, const void* scales, const void* biases);

  const uint8_t* panel(int index) const { return panels.data() + shape.panel_bytes() * index; }

  // One row of W as float32 [inputs], dequantized without any rounding but float32's.
  void row(int output, float* out) const;

  // The matrices this was packed from, bit by bit. Buffers are laid out as the constructors take them.
  void unpack_dense(void* weight) const;
  void unpack_affine(uint32_t* codes, void* scales, void* biases) const;

  PackedShape shape;
  Buffer panels;
  std::vector<float> bias;  // added to the result: padded to whole panels; empty if there is none
};

}  // namespace octavo
