// The selective scan of Mamba-1. Most of its time goes to exponentials: one per state value and token.
#include "recurrent/loops.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kChannels = 64;  // channels per item; a multiple of kTile

// Applies tokens one by one to channels [channel, channel + count).
void walk_channels(const ScanCall& call, const Piece& piece, int channel, int count) {
  const int size = call.Ds;
  HeadRows state(call.pool, piece, static_cast<int64_t>(call.W) * size, static_cast<int64_t>(channel) * size,
                 static_cast<int64_t>(count) * size);
  float* const B = static_cast<float*>(thread_scratch(sizeof(float) * 2 * size));
  float* const C = B + size;
  alignas(64) float x[kChannels], d[kChannels], out[kChannels], y[kChannels];
  for (int row = piece.start; row < piece.start + piece.length; ++row) {
    load_row(call.B, row, 0, size, B);
    load_row(call.C, row, 0, size, C);
    load_row(call.x, row, channel, count, x);
    load_row(call.d, row, channel, count, d);
    for_tiles(count, [&](auto tile, int c) {
      Vec acc[kTile]{};
      for (int r = 0; r < tile; ++r) {
        const Vec step = splat(d[c + r]), in = splat(d[c + r] * x[c + r]);
        for (int i = 0; i < size; i += kLanes) {
          const int64_t at = static_cast<int64_t>(c + r) * size + i;
          const Vec decay = exp_lanes(step * load(call.A + static_cast<int64_t>(channel) * size + at));
          const Vec s = fma(load(state.source + at), decay, in * load(B + i));
          store(state.target + at, s);
          acc[r] = fma(s, load(C + i), acc[r]);
        }
      }
      alignas(16) float four[kTile];
      store_sums(acc, four);
      for (int r = 0; r < tile; ++r) out[c + r] = four[r];
    });
    for (int c = 0; c < count; ++c) y[c] = fma(call.D[channel + c], x[c], out[c]);
    store_floats(call.y, call.x.type, static_cast<int64_t>(row) * call.W + channel, count, y);
    state.source = state.target;
  }
}

}  // namespace

void selective_scan(const ScanCall& call) {
  const int parts = (call.W + kChannels - 1) / kChannels;
  for_pieces(call.step, parts, [&](const Piece& piece, int part) {
    const int channel = part * kChannels;
    walk_channels(call, piece, channel, std::min(kChannels, call.W - channel));
  });
}

}  // namespace octavo::OCTAVO_ISA
