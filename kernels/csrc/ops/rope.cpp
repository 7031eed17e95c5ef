#include <array>
#include <cstring>

#include "ops/graph.h"
#include "ops/ops.h"
#include "ops/views.h"
#include "program/primitive.h"
#include "runtime/dispatch.h"

namespace octavo {
namespace {

// Inputs: offsets int32 [B], inverse frequencies [half]. Output: angles [B, length, 2, half].
class RopeAngles : public CpuPrimitive {
 public:
  RopeAngles(mx::Stream stream, float position_scale)
      : CpuPrimitive(stream), position_scale_(position_scale) {}

  const char* name() const override { return "octavo.rope_angles"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return position_scale_ == static_cast<const RopeAngles&>(other).position_scale_;
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    const mx::array offsets = row_contiguous(inputs[0], encoder);
    const mx::array frequencies = row_contiguous(inputs[1], encoder);
    mx::array& y = outputs[0];
    allocate(y);
    const AngleCall call{offsets.data<int32_t>(),
                         frequencies.data<float>(),
                         position_scale_,
                         y.shape(0),
                         y.shape(1),
                         y.shape(3),
                         y.data<float>()};
    encoder.dispatch([call] { OCTAVO_AT_LEVEL(rope_angles, call); });
  }

 private:
  float position_scale_;
};

// Strides of batch, head and token of x, and the offset of its first element, in an input with a contiguous
// last axis.
struct Heads {
  int64_t offset;
  std::array<int64_t, 3> strides;
};

// Returns where heads begin in x [B, H, L, D] or [B, L, D] with these strides.
std::optional<Heads> heads_of(const mx::array& x, int64_t offset, const mx::Strides& strides) {
  if (x.shape(-1) != 1 && strides.back() != 1) return std::nullopt;
  if (x.ndim() == 3) return Heads{offset, {strides[0], 0, strides[1]}};
  return Heads{offset, {strides[0], strides[1], strides[2]}};
}

// Inputs: x, angles. Output: y.
class Rope : public CpuPrimitive {
 public:
  Rope(mx::Stream stream, const RopeOptions& options, std::optional<Heads> heads)
      : CpuPrimitive(stream), options_(options), heads_(heads) {}

  const char* name() const override { return "octavo.rope"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    mx::array& y = outputs[0];
    allocate(y);
    if (y.size() == 0) return;
    RopeCall call{};
    const Heads heads = place(inputs[0], encoder, call);
    for (int i = 0; i < 3; ++i) call.strides[i] = heads.strides[i];
    call.batch = y.shape(0);
    call.heads = y.ndim() == 3 ? 1 : y.shape(1);
    call.length = y.shape(-2);
    call.size = y.shape(-1);
    call.angles = inputs[1].data<float>();
    call.angle_stride = inputs[1].shape(0) == 1 ? 0 : static_cast<int64_t>(call.length) * options_.dims;
    call.type = float_of(y.dtype());
    call.dims = options_.dims;
    call.interleaved = options_.interleaved;
    call.scale = options_.value_scale;
    call.y = y.data<void>();
    encoder.dispatch([call] { OCTAVO_AT_LEVEL(rope, call); });
  }

 private:
  Heads place(const mx::array& input, Encoder& encoder, RopeCall& call) const {
    if (heads_) {
      call.x = input.data<char>() + heads_->offset * input.itemsize();
      return *heads_;
    }
    call.x = input.data<void>();
    if (const auto heads = heads_of(input, 0, input.strides())) return *heads;
    const mx::array plain = row_contiguous(input, encoder);
    call.x = plain.data<void>();
    return *heads_of(plain, 0, plain.strides());
  }

  RopeOptions options_;
  std::optional<Heads> heads_;
};

// Returns the angles of a step. The last few are cached, because all layers use equal angles. (Replayed
// graphs do not need the cache, because MLX joins equivalent nodes when it traces.)
mx::array angles_for(const mx::array& offset, const mx::array& inverse_frequencies, int length,
                     float position_scale, mx::Stream stream) {
  struct Entry {
    mx::array offset, frequencies, angles;  // kept alive, because ids of destroyed arrays are reused
    int length;
    float scale;
  };
  constexpr std::size_t kKept = 8;
  // Leaked on purpose: the thread may end after MLX's static objects are destroyed.
  static thread_local auto& kept = *new std::vector<Entry>;
  for (const Entry& entry : kept)
    if (entry.offset.id() == offset.id() && entry.frequencies.id() == inverse_frequencies.id() &&
        entry.length == length && entry.scale == position_scale)
      return entry.angles;
  const mx::array flat = mx::astype(mx::reshape(offset, {-1}, stream), mx::int32, stream);
  mx::array angles({flat.shape(0), length, 2, inverse_frequencies.shape(0)}, mx::float32,
                   std::make_shared<RopeAngles>(stream, position_scale), {flat, inverse_frequencies});
  if (kept.size() == kKept) kept.erase(kept.begin());
  kept.push_back({offset, inverse_frequencies, angles, length, position_scale});
  return angles;
}

}  // namespace

mx::array rope(const mx::array& x, const mx::array& offset, const mx::array& inverse_frequencies,
               const RopeOptions& options, mx::StreamOrDevice stream) {
  require_floats("x", x, x.ndim() == 3 || x.ndim() == 4, "[B, H, L, D] or [B, L, D]");
  require(options.dims >= 2 && options.dims % 2 == 0 && options.dims <= x.shape(-1),
          "dims must be even and lie in [2, " + std::to_string(x.shape(-1)) + "], got " +
              std::to_string(options.dims));
  require(inverse_frequencies.shape() == mx::Shape{options.dims / 2} &&
              inverse_frequencies.dtype() == mx::float32,
          "inverse_frequencies must be float32 [" + std::to_string(options.dims / 2) + "], got " +
              array_text(inverse_frequencies));
  const bool per_row = offset.ndim() == 1 && (offset.shape(0) == 1 || offset.shape(0) == x.shape(0));
  require((offset.ndim() == 0 || per_row) && mx::issubdtype(offset.dtype(), mx::integer),
          "offset must be an integer or integers [" + std::to_string(x.shape(0)) + "], got " +
              array_text(offset));
  const mx::Stream cpu = cpu_stream(stream);
  const mx::array angles = angles_for(offset, inverse_frequencies, x.shape(-2), options.position_scale, cpu);
  const auto view = find_view(x);
  const auto heads = view ? heads_of(x, view->offset, view->strides) : std::nullopt;
  return mx::array(x.shape(), x.dtype(), std::make_shared<Rope>(cpu, options, heads),
                   {heads ? view->base : x, angles});
}

}  // namespace octavo
