// Dense weights to MLX's affine format on all threads: the bits of mx.quantize, which uses one.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include <algorithm>
#include <cmath>

#include "program/primitive.h"
#include "runtime/threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

constexpr int kMaxGroup = 128;
constexpr int kLanes = 8;

struct Scale {
  float step, edge;
};

// As MLX chooses them: `edge`, the end that is farther from zero, becomes a code exactly, and so does zero.
Scale choose_scale(const float* values, int group, float largest_code) {
  float low[kLanes], high[kLanes];
  for (int i = 0; i < kLanes; ++i) low[i] = high[i] = values[i];
  for (int j = kLanes; j < group; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      low[i] = values[j + i] < low[i] ? values[j + i] : low[i];
      high[i] = values[j + i] > high[i] ? values[j + i] : high[i];
    }
  }
  for (int i = 1; i < kLanes; ++i) {
    low[0] = std::min(low[0], low[i]);
    high[0] = std::max(high[0], high[i]);
  }
  const bool from_low = std::abs(low[0]) > std::abs(high[0]);
  const float width = std::max((high[0] - low[0]) / largest_code, 1e-7f);
  const float step = from_low ? width : -width, edge = from_low ? low[0] : high[0];
  const float code = std::rint(edge / step);
  return code != 0 ? Scale{edge / code, edge} : Scale{step, 0};
}

struct Quantize {
  const void* weight;
  Float type;
  int group, bits;
  uint32_t* codes;
  void* scales;
  void* biases;

  // Groups [first, first + count).
  void run(int64_t first, int64_t count) const {
    const float largest_code = static_cast<float>((1 << bits) - 1);
    const int words = group * bits / 32, per_word = 32 / bits;
    constexpr float kRound = 0x1.8p23f;  // added to a number below 2^22, leaves it rounded, ties to even
    float values[kMaxGroup];
    for (int64_t g = first; g < first + count; ++g) {
      load_floats(weight, type, static_cast<std::size_t>(g) * group, group, values);
      const Scale scale = choose_scale(values, group, largest_code);
      uint32_t rounded[kMaxGroup];
      for (int j = 0; j < group; ++j) {
        const float code = (values[j] - scale.edge) / scale.step;
        const float within = code > 0 ? (code < largest_code ? code : largest_code) : 0;  // and 0 for NaN
        rounded[j] = as_bits(within + kRound) & 0x3fffff;
      }
      for (int word = 0; word < words; ++word) {
        uint32_t packed = 0;
        for (int j = 0; j < per_word; ++j) packed |= rounded[word * per_word + j] << j * bits;
        codes[g * words + word] = packed;
      }
      store_floats(scales, type, static_cast<std::size_t>(g), 1, &scale.step);
      store_floats(biases, type, static_cast<std::size_t>(g), 1, &scale.edge);
    }
  }
};

class QuantizeWeights : public CpuPrimitive {
 public:
  QuantizeWeights(mx::Stream stream, int group, int bits)
      : CpuPrimitive(stream), group_(group), bits_(bits) {}

  const char* name() const override { return "octavo.quantize_weights"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    const mx::array w = row_contiguous(inputs[0], encoder);
    for (mx::array& output : outputs) allocate(output);
    const Quantize work{
        w.data<void>(),          float_of(w.dtype()),    group_, bits_, outputs[0].data<uint32_t>(),
        outputs[1].data<void>(), outputs[2].data<void>()};
    const int64_t groups = static_cast<int64_t>(w.size()) / group_;
    encoder.dispatch([work, groups] {
      constexpr int64_t kGroups = 512;  // at once
      parallel_for(static_cast<int>((groups + kGroups - 1) / kGroups),
                   [&](int item) { work.run(item * kGroups, std::min(kGroups, groups - item * kGroups)); });
    });
  }

 private:
  int group_, bits_;
};

nb::tuple quantize_weights(const mx::array& w, int group_size, int bits, mx::StreamOrDevice stream) {
  require(bits == 2 || bits == 4 || bits == 8, "bits must be 2, 4 or 8, got " + std::to_string(bits));
  require(group_size == 32 || group_size == 64 || group_size == 128,
          "group_size must be 32, 64 or 128, got " + std::to_string(group_size));
  require(w.ndim() >= 2 && w.size() > 0 && is_float(w.dtype()) && w.shape(-1) % group_size == 0,
          "w must be bfloat16, float16 or float32 [..., inputs], whole groups of " +
              std::to_string(group_size) + ", got " + dtype_text(w.dtype()) + " " + shape_text(w));
  mx::Shape codes = w.shape(), groups = w.shape();
  codes.back() = w.shape(-1) * bits / 32;
  groups.back() = w.shape(-1) / group_size;
  const std::vector<mx::array> results =
      mx::array::make_arrays({codes, groups, groups}, {mx::uint32, w.dtype(), w.dtype()},
                             std::make_shared<QuantizeWeights>(cpu_stream(stream), group_size, bits), {w});
  return nb::make_tuple(results[0], results[1], results[2]);
}

}  // namespace

void bind_quantize_weights(nb::module_& m) {
  m.def("quantize_weights", &quantize_weights, "w"_a, nb::kw_only(), "group_size"_a, "bits"_a,
        "stream"_a = nb::none(),
        "w [..., inputs] of finite numbers -> codes, scales, biases: bit by bit those of mx.quantize, affine "
        "with 2, 4 or 8 bits.");
}

}  // namespace octavo
