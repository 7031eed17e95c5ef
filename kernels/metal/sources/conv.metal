// Short causal convolution over the rows of each segment, then its activation; one thread per segment and
// channel.
//   pool [slots, TAPS - 1, CHANNELS]: the last inputs, oldest first. It is also passed as `to_pool`, which is written
//   segments, checkpoints: see recurrent.metal
//   x [T, CHANNELS], weight [TAPS, CHANNELS], optional bias [CHANNELS]  ->  y [T, CHANNELS]
//   grid: (CHANNELS, 1, segments)
// AHEAD inputs are loaded at once, because they do not depend on computed values.

#define UNROLL _Pragma("clang loop unroll(full)")
#define KEPT (TAPS - 1)

template <typename T>
METAL_FUNC void store_window(const device T* pool, int slot, uint channel, thread const float* window) {
  device T* const to = (device T*)pool + ulong(uint(slot)) * (KEPT * CHANNELS) + channel;
  UNROLL
  for (uint j = 0; j < KEPT; ++j) {
    to[j * CHANNELS] = T(window[j]);
  }
}

template <typename T>
METAL_FUNC void store_one(device T* to, float x) {
  *to = T(x);
}
//! body
const uint channel = threadgroup_position_in_grid.x * THREADS + thread_index_in_threadgroup;
const device int* const segment = segments + 8 * threadgroup_position_in_grid.z;
const int first = segment[0], end = first + segment[1], source = segment[2];
int kept = segment[4];
const int end_kept = segment[5];
if (channel >= CHANNELS) {
  return;
}
float taps[TAPS], window[KEPT];
UNROLL
for (uint j = 0; j < TAPS; ++j) {
  taps[j] = float(weight[j * CHANNELS + channel]);
}
UNROLL
for (uint j = 0; j < KEPT; ++j) {
  window[j] = source >= 0 ? float(pool[(ulong(uint(source)) * KEPT + j) * CHANNELS + channel]) : 0.0f;
}
const float offset = BIAS;
for (int block = first; block < end; block += AHEAD) {
  float inputs[AHEAD];
  UNROLL
  for (int n = 0; n < AHEAD; ++n) {
    inputs[n] = float(x[ulong(uint(min(block + n, end - 1))) * CHANNELS + channel]);
  }
  UNROLL
  for (int n = 0; n < AHEAD; ++n) {
    const int t = block + n;
    if (t < end) {  // uniform across the threadgroup
      float sum = offset;
      UNROLL
      for (uint j = 0; j < KEPT; ++j) {
        sum = fma(taps[j], window[j], sum);
      }
      sum = fma(taps[KEPT], inputs[n], sum);
#if SILU
      sum = sum / (1.0f + exp(-sum));
#endif
      store_one(y + ulong(uint(t)) * CHANNELS + channel, sum);
      UNROLL
      for (uint j = 0; j + 1 < KEPT; ++j) {
        window[j] = window[j + 1];
      }
      window[KEPT - 1] = inputs[n];
      for (; kept < end_kept && checkpoints[2 * kept] == t; ++kept) {
        store_window(to_pool, checkpoints[2 * kept + 1], channel, window);
      }
    }
  }
}
store_window(to_pool, segment[3], channel, window);
