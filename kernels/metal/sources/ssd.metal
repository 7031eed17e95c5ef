// Mamba-2's recurrence over the segments of a step: S = S exp(-exp(A_log) d) + (d x) B'; y = S C + D x.
//   x [T, HEADS, HEIGHT], B and C [T, KEY_HEADS, WIDTH], dt [T, HEADS]
//   A_log, dt_bias, D [HEADS]; limits: the lowest and the highest step d
//   ->  y [T, HEADS, HEIGHT]
//   grid: (tiles of rows, HEADS, segments)

// Comparisons instead of min and max, which would replace NaN.
METAL_FUNC float within(float d, float lowest, float highest) { return d < lowest ? lowest : d > highest ? highest : d; }
//! body
threadgroup float decays[BLOCK], steps[BLOCK];  // of the next BLOCK tokens; all rows of a head use them
const uint lane = thread_index_in_simdgroup, thread_index = thread_index_in_threadgroup;
const device int* const segment = segments + 8 * threadgroup_position_in_grid.z;
const int first = segment[0], end = first + segment[1];
int kept = segment[4];
const int end_kept = segment[5];
const Place place =
    place_of(threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, simdgroup_index_in_threadgroup, lane);
const uint group = place.head / (HEADS / KEY_HEADS);
const float rate = exp(float(A_log[place.head])), offset = float(dt_bias[place.head]), skip = float(D[place.head]);
float state[ROWS * VALUES];
load_state(pool, segment[2], place, state);

for (int block = first; block < end; block += BLOCK) {
  const int count = min(int(BLOCK), end - block);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // earlier steps may be overwritten
  for (uint i = thread_index; i < uint(count); i += THREADS) {
    const float raw = float(dt[ulong(uint(block) + i) * HEADS + place.head]);
    const float d = within(softplus(raw + offset), limits[0], limits[1]);
    steps[i] = d;
    decays[i] = exp(-(rate * d));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the steps are stored
  for (int n = 0; n < count; ++n) {
    const uint t = uint(block + n);
    float in[VALUES], out[VALUES];
    load_values(B + (ulong(t) * KEY_HEADS + group) * WIDTH, place.across, in);
    load_values(C + (ulong(t) * KEY_HEADS + group) * WIDTH, place.across, out);
    UNROLL
    for (uint j = 0; j < ROWS; ++j) {
      const ulong at = (ulong(t) * HEADS + place.head) * HEIGHT + place.read_row(j);
      const float value = float(x[at]), scaled = steps[n] * value;
      float sum = 0.0f;
      UNROLL
      for (uint i = 0; i < VALUES; ++i) {
        const float s = fma(scaled, in[i], state[j * VALUES + i] * decays[n]);
        state[j * VALUES + i] = s;
        sum = fma(s, out[i], sum);
      }
      sum = row_sum(sum);
      if (place.across == 0 && place.row_at(j) < HEIGHT) {
        store_one(y + at, fma(skip, value, sum));
      }
    }
    for (; kept < end_kept && checkpoints[2 * kept] == int(t); ++kept) {  // uniform across the threadgroup
      store_state(to_pool, checkpoints[2 * kept + 1], place, state);
    }
  }
}
store_state(to_pool, segment[3], place, state);
