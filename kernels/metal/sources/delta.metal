// Gated delta rule over the segments of a step: S = S diag(g); u = beta (v - S k); S += u k'; y = S q.
//   q, k [T, KEY_HEADS, WIDTH], v [T, HEADS, HEIGHT], a [T, HEADS] or, with a gate per dim, [T, HEADS, WIDTH],
//   b [T, HEADS]; GATES is the number of gates per head
//   unless a is already g and b is beta: A_log [HEADS] or, with WIDE_A, [HEADS, GATES]; dt_bias [HEADS, GATES];
//   limits: lower bound of log g, scale of beta
//   ->  y [T, HEADS, HEIGHT]
//   grid: (tiles of rows, HEADS, segments)
// Both products read the decayed state, y = S q + u (k . q), so a token needs only one round of sums across
// lanes.

METAL_FUNC float softplus_decay(float a, float A_log, float dt_bias) {
  return exp(-(exp(A_log) * softplus(a + dt_bias)));
}

METAL_FUNC float bounded_decay(float a, float A_log, float dt_bias, float lower_bound) {
  return exp(lower_bound * sigmoid(exp(A_log) * (a + dt_bias)));
}
//! body
// of the next BLOCK tokens; all rows of a head use them
threadgroup float decays[BLOCK * GATES], betas[BLOCK];
const uint lane = thread_index_in_simdgroup, thread_index = thread_index_in_threadgroup;
const device int* const segment = segments + 8 * threadgroup_position_in_grid.z;
const int first = segment[0], end = first + segment[1];
int kept = segment[4];
const int end_kept = segment[5];
const Place place =
    place_of(threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, simdgroup_index_in_threadgroup, lane);
const uint key_head = place.head / (HEADS / KEY_HEADS);
float state[ROWS * VALUES];
load_state(pool, segment[2], place, state);

for (int block = first; block < end; block += BLOCK) {
  const int count = min(int(BLOCK), end - block);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // earlier gates may be overwritten
  for (uint i = thread_index; i < uint(count) * GATES; i += THREADS) {
    const uint at = place.head * GATES + i % GATES;
    const float gate = float(a[ulong(uint(block) + i / GATES) * (HEADS * GATES) + at]);
    decays[i] = DECAY(gate, at);
  }
  for (uint i = thread_index; i < uint(count); i += THREADS) {
    const float beta = float(b[ulong(uint(block) + i) * HEADS + place.head]);
    betas[i] = BETA(beta);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the gates are stored
  for (int n = 0; n < count; ++n) {
    const uint t = uint(block + n);
    float query[VALUES], key[VALUES], products[ROWS], outs[ROWS], both = 0.0f;
    load_values(q + (ulong(t) * KEY_HEADS + key_head) * WIDTH, place.across, query);
    load_values(k + (ulong(t) * KEY_HEADS + key_head) * WIDTH, place.across, key);
    UNROLL
    for (uint i = 0; i < VALUES; ++i) {
      both = fma(key[i], query[i], both);
    }
    both = row_sum(both);
    UNROLL
    for (uint j = 0; j < ROWS; ++j) {
      products[j] = 0.0f;
      outs[j] = 0.0f;
      UNROLL
      for (uint i = 0; i < VALUES; ++i) {
        const float s = state[j * VALUES + i] * decays[uint(n) * GATES + GATE_AT(i)];
        state[j * VALUES + i] = s;
        products[j] = fma(s, key[i], products[j]);
        outs[j] = fma(s, query[i], outs[j]);
      }
      products[j] = row_sum(products[j]);
      outs[j] = row_sum(outs[j]);
    }
    UNROLL
    for (uint j = 0; j < ROWS; ++j) {
      const ulong at = (ulong(t) * HEADS + place.head) * HEIGHT + place.read_row(j);
      const float u = (float(v[at]) - products[j]) * betas[n];
      UNROLL
      for (uint i = 0; i < VALUES; ++i) {
        state[j * VALUES + i] = fma(u, key[i], state[j * VALUES + i]);
      }
      if (place.across == 0 && place.row_at(j) < HEIGHT) {
        store_one(y + at, fma(u, both, outs[j]));
      }
    }
    for (; kept < end_kept && checkpoints[2 * kept] == int(t); ++kept) {  // uniform across the threadgroup
      store_state(to_pool, checkpoints[2 * kept + 1], place, state);
    }
  }
}
store_state(to_pool, segment[3], place, state);
