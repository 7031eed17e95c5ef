// Adds the adapters of a step's rows to the outputs of PARTS layers; one thread for ROWS rows and an output.
//    y0 [T, OUTPUTS_0], ..., z (shrink.metal), slots, places, scales [slots + 1, PARTS], b0 [ranks, OUTPUTS_0],
//    ..., and with GAINS gains0, biases0 [slots + 1, OUTPUTS_0], ...  ->  to0 [T, OUTPUTS_0], ...
//    grid: (outputs of the widest layer, T / ROWS, PARTS)

// The rows' products of one part, in registers of a thread.
struct Rows {
  const device float* z;
  uint stride;
  int rank;
  float scale;
};

template <int R, typename B>
METAL_FUNC void sum(Rows rows, const device B* b, uint outputs, thread float* sums) {
  UNROLL
  for (int r = 0; r < R; ++r) {
    sums[r] = 0.0f;
  }
  for (int k = 0; k < rows.rank; ++k) {
    const float factor = float(b[ulong(uint(k)) * outputs]);
    UNROLL
    for (int r = 0; r < R; ++r) {
      sums[r] = fma(rows.z[uint(r) * rows.stride + uint(k)], factor, sums[r]);
    }
  }
  UNROLL
  for (int r = 0; r < R; ++r) {
    sums[r] *= rows.scale;
  }
}

template <typename T>
METAL_FUNC void store_one(device T* to, float x) {
  *to = T(x);
}

#if GAINS
#define FINISH(p) \
  place[3] ? fma(gains##p[at_slot], y - biases##p[at_slot] + sums[r], biases##p[at_slot]) : y + sums[r]
#else
#define FINISH(p) y + sums[r]
#endif

#define ADD(p)                                                                            \
  if (part == p && output < OUTPUTS_##p) {                                                \
    const device auto* const b = b##p + ulong(uint(place[1])) * OUTPUTS_##p + output;     \
    if (together) {                                                                       \
      sum<ROWS>(rows, b, OUTPUTS_##p, sums);                                              \
    } else {                                                                              \
      sum<1>(rows, b, OUTPUTS_##p, sums);                                                 \
    }                                                                                     \
    for (int r = 0; r < (together ? ROWS : 1); ++r) {                                     \
      const ulong at = ulong(uint(row + r)) * OUTPUTS_##p + output;                       \
      const uint at_slot = uint(slots[row]) * OUTPUTS_##p + output;                       \
      const float y = float(y##p[at]);                                                    \
      store_one(to##p + at, place[2] ? FINISH(p) : y);                                    \
      (void)at_slot;                                                                      \
    }                                                                                     \
  }
//! body
const uint output = threadgroup_position_in_grid.x * THREADS + thread_index_in_threadgroup;
const uint part = threadgroup_position_in_grid.z;
const uint most = uint(z_shape[2]);
const int first = int(threadgroup_position_in_grid.y) * ROWS, count = min(ROWS, z_shape[0] - first);
const bool together = count == ROWS && share_slot(slots, first, count);
float sums[ROWS];
for (int row = first; row < first + count; row += together ? ROWS : 1) {
  const device int* const place = place_of(places, slots[row], part);
  const Rows rows = {z + (uint(row) * PARTS + part) * most, PARTS * most, place[2],
                     scales[uint(slots[row]) * PARTS + part]};
  EACH_PART(ADD)
}
