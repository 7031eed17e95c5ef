// The real-gated linear recurrent unit (RG-LRU), including its gates.
#include "recurrent/loops.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kChannels = 256;  // channels per item; whole vectors

inline Vec square_root(Vec x) {
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

struct Channels {
  alignas(64) float h[kChannels]{}, x[kChannels]{}, input[kChannels]{}, gate[kChannels]{}, c[kChannels]{};
};

// Applies one token. If it is the first of its sequence, its input is not scaled.
inline void advance(Channels& channels, int count, bool first) {
  for (int i = 0; i < count; i += kLanes) {
    const Vec log_a = load(channels.c + i) * sigmoid_lanes(load(channels.gate + i)), a = exp_lanes(log_a);
    const Vec scale = first ? splat(1.0f) : square_root(1.0f - exp_lanes(log_a + log_a));
    const Vec in = load(channels.x + i) * sigmoid_lanes(load(channels.input + i)) * scale;
    store(channels.h + i, fma(a, load(channels.h + i), in));
  }
}

void walk_channels(const LruCall& call, const Piece& piece, int channel, int count) {
  Channels channels;
  std::memcpy(channels.c, call.c + channel, sizeof(float) * count);
  const auto slot = [&](int number) { return call.pool + static_cast<int64_t>(number) * call.W + channel; };
  if (piece.source >= 0) std::memcpy(channels.h, slot(piece.source), sizeof(float) * count);
  for (int row = piece.start; row < piece.start + piece.length; ++row) {
    load_row(call.x, row, channel, count, channels.x);
    load_row(call.input_gate, row, channel, count, channels.input);
    load_row(call.a_gate, row, channel, count, channels.gate);
    advance(channels, count, piece.source < 0 && row == piece.start);
    store_floats(call.y, call.x.type, static_cast<int64_t>(row) * call.W + channel, count, channels.h);
  }
  std::memcpy(slot(piece.target), channels.h, sizeof(float) * count);
}

}  // namespace

void rg_lru(const LruCall& call) {
  const int parts = (call.W + kChannels - 1) / kChannels;
  for_pieces(call.step, parts, [&](const Piece& piece, int part) {
    const int channel = part * kChannels;
    walk_channels(call, piece, channel, std::min(kChannels, call.W - channel));
  });
}

}  // namespace octavo::OCTAVO_ISA
