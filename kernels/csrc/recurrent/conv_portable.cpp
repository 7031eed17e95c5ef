// Depthwise causal convolution of few taps, with its activation. A block of tokens is converted to float32
// once, after the inputs that precede it.
#include <cstring>

#include "recurrent/loops.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kChannels = 256;  // channels per item
constexpr int kBlock = 16;      // tokens per block

// Computes one token's outputs `y` for `channels` channels; x points to the oldest input row of the token.
inline void conv_row(const ConvCall& call, const float* x, const float* weight, const float* bias,
                     int channels, float* y) {
  for (int c = 0; c < channels; c += kLanes) {
    Vec acc = load(bias + c);
    for (int j = 0; j < call.taps; ++j)
      acc = fma(load(x + j * kChannels + c), load(weight + j * kChannels + c), acc);
    store(y + c, call.silu ? acc * sigmoid_lanes(acc) : acc);
  }
}

// Memory for an item, as rows of kChannels floats: weights, bias, taps - 1 earlier inputs, then a block's
// inputs.
struct ConvScratch {
  float *weight, *bias, *x;
};

ConvScratch load_scratch(const ConvCall& call, int first, int channels) {
  const std::size_t rows = 2 * call.taps + kBlock;
  float* const memory = static_cast<float*>(thread_scratch(sizeof(float) * rows * kChannels));
  const ConvScratch scratch{memory, memory + call.taps * kChannels, memory + (call.taps + 1) * kChannels};
  for (int j = 0; j < call.taps; ++j)
    load_floats(call.weight, call.weight_type, static_cast<int64_t>(j) * call.channels + first, channels,
                scratch.weight + j * kChannels);
  if (call.bias != nullptr) load_floats(call.bias, call.bias_type, first, channels, scratch.bias);
  else std::memset(scratch.bias, 0, sizeof(float) * kChannels);
  return scratch;
}

void walk_channels(const ConvCall& call, const Piece& piece, int first, int channels) {
  const int past = call.taps - 1;
  const ConvScratch scratch = load_scratch(call, first, channels);
  const auto window = [&](int slot, int j) {
    return (static_cast<int64_t>(slot) * past + j) * call.channels + first;
  };
  std::memset(scratch.x, 0, sizeof(float) * past * kChannels);
  for (int j = 0; j < past && piece.source >= 0; ++j)
    load_floats(call.pool, call.pool_type, window(piece.source, j), channels, scratch.x + j * kChannels);
  alignas(64) float y[kChannels];
  for (int done = 0; done < piece.length; done += kBlock) {
    const int count = std::min(kBlock, piece.length - done);
    for (int t = 0; t < count; ++t) {
      const int64_t row = piece.start + done + t;
      load_row(call.x, row, first, channels, scratch.x + (past + t) * kChannels);
      conv_row(call, scratch.x + t * kChannels, scratch.weight, scratch.bias, channels, y);
      store_floats(call.y, call.x.type, row * call.channels + first, channels, y);
    }
    std::memmove(scratch.x, scratch.x + count * kChannels, sizeof(float) * past * kChannels);
  }
  const std::size_t size = float_size(call.pool_type);
  char* const pool = static_cast<char*>(call.pool);
  for (int j = 0; j < past; ++j) {
    if (piece.source >= 0 && j + piece.length < past)  // still in the window, only shifted
      std::memmove(pool + size * window(piece.target, j),
                   pool + size * window(piece.source, j + piece.length), size * channels);
    else
      store_floats(call.pool, call.pool_type, window(piece.target, j), channels, scratch.x + j * kChannels);
  }
}

}  // namespace

void causal_conv(const ConvCall& call) {
  const int parts = (call.channels + kChannels - 1) / kChannels;
  for_pieces(call.step, parts, [&](const Piece& piece, int part) {
    const int first = part * kChannels;
    walk_channels(call, piece, first, std::min(kChannels, call.channels - first));
  });
}

}  // namespace octavo::OCTAVO_ISA
