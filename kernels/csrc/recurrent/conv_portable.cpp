// Depthwise causal convolution of few taps, with its activation. A block of tokens is converted to float32
// once, after the inputs that precede it. A single token, as in decoding, is computed directly from the
// window with the same operations.
#include <cstring>
#include <type_traits>

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

// Loads and stores vectors of T, the type in memory.
template <class T>
struct Raw {
  typedef T Values __attribute__((vector_size(sizeof(T) * kLanes), aligned(sizeof(T)), may_alias));

  static Values load(const T* from) { return *reinterpret_cast<const Values*>(from); }
  static void store(T* to, Values value) { *reinterpret_cast<Values*>(to) = value; }

  static Vec widen(Values value) {
    if constexpr (std::is_same_v<T, float>) return (Vec)value;
    else return (Vec)(__builtin_convertvector(value, UintVec) << 16);  // bf16
  }
};

// Computes one token if window, x, weights and bias are all of type T (float or bf16) and channels fill whole
// vectors. Windows of many sequences are not in a cache, and their rows are too short for hardware
// prefetchers. So each item prefetches the next item's rows.
template <class T, int kTaps>
void walk_token(const ConvCall& call, const Piece& piece, int first, int channels) {
  using Lanes = Raw<T>;
  const int taps = kTaps > 0 ? kTaps : call.taps;
  const int64_t size = call.channels, slot = (taps - 1) * size;
  T* const pool = static_cast<T*>(call.pool) + first;
  const T* const source = piece.source < 0 ? nullptr : pool + piece.source * slot;
  T* const target = pool + piece.target * slot;
  const T* const weight = static_cast<const T*>(call.weight) + first;
  const T* const bias = call.bias == nullptr ? nullptr : static_cast<const T*>(call.bias) + first;
  const T* const x = static_cast<const T*>(call.x.data) + piece.start * call.x.stride + first;
  alignas(64) float y[kChannels];
  for (int c = 0; c < channels; c += kLanes) {
    Vec acc = bias == nullptr ? Vec{} : Lanes::widen(Lanes::load(bias + c));
    for (int j = 0; j < taps; ++j) {
      typename Lanes::Values value{};
      if (j == taps - 1) value = Lanes::load(x + c);
      else if (source != nullptr) {
        value = Lanes::load(source + j * size + c);
        __builtin_prefetch(source + j * size + c + kChannels);
      }
      if (j > 0) Lanes::store(target + (j - 1) * size + c, value);
      acc = fma(Lanes::widen(value), Lanes::widen(Lanes::load(weight + j * size + c)), acc);
    }
    store(y + c, call.silu ? acc * sigmoid_lanes(acc) : acc);
  }
  store_floats(call.y, call.x.type, static_cast<int64_t>(piece.start) * size + first, channels, y);
}

// Computes the item by walk_token if that supports it; returns whether it does.
bool take_token(const ConvCall& call, const Piece& piece, int first, int channels) {
  const Float type = call.x.type;
  if (piece.length != 1 || channels % kLanes != 0 || type == Float::f16 || call.pool_type != type ||
      call.weight_type != type || (call.bias != nullptr && call.bias_type != type))
    return false;
  const auto walk = [&](auto one) {
    using T = decltype(one);
    if (call.taps == 4) walk_token<T, 4>(call, piece, first, channels);
    else walk_token<T, 0>(call, piece, first, channels);
  };
  if (type == Float::f32) walk(float{});
  else walk(bf16_t{});
  return true;
}

// Memory for an item, as rows of kChannels floats: weights, bias, taps - 1 earlier inputs, then a block's
// inputs.
struct ConvScratch {
  float *weight, *bias, *x;
};

ConvScratch load_scratch(const ConvCall& call, int first, int channels) {
  const std::size_t rows = 2 * call.taps + kBlock;
  float* const memory = static_cast<float*>(thread_scratch(sizeof(float) * rows * kChannels));
  std::memset(memory, 0, sizeof(float) * rows * kChannels);
  const ConvScratch scratch{memory, memory + call.taps * kChannels, memory + (call.taps + 1) * kChannels};
  for (int j = 0; j < call.taps; ++j)
    load_floats(call.weight, call.weight_type, static_cast<int64_t>(j) * call.channels + first, channels,
                scratch.weight + j * kChannels);
  if (call.bias != nullptr) load_floats(call.bias, call.bias_type, first, channels, scratch.bias);
  return scratch;
}

void walk_channels(const ConvCall& call, const Piece& piece, int first, int channels) {
  if (take_token(call, piece, first, channels)) return;
  const int past = call.taps - 1;
  const ConvScratch scratch = load_scratch(call, first, channels);
  const auto window = [&](int slot, int j) {
    return (static_cast<int64_t>(slot) * past + j) * call.channels + first;
  };
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
  for (int j = 0; j < past; ++j)
    store_floats(call.pool, call.pool_type, window(piece.target, j), channels, scratch.x + j * kChannels);
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
