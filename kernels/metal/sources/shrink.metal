// Products of a step's rows with the first factor of their adapters; one simdgroup for ROWS rows and a rank.
//    x [T, INPUTS], slots, places, a [ranks, INPUTS]  ->  z [T, PARTS, most ranks]
//    grid: (32 T / ROWS, most ranks, PARTS)

template <int R, typename X, typename A>
METAL_FUNC void multiply(const device X* x, const device A* a, uint lane, device float* z, uint z_stride) {
  float sums[R] = {};
  for (uint i = lane; i < INPUTS; i += 32) {
    const float factor = float(a[i]);
    UNROLL
    for (int r = 0; r < R; ++r) {
      sums[r] = fma(float(x[ulong(uint(r)) * INPUTS + i]), factor, sums[r]);
    }
  }
  UNROLL
  for (int r = 0; r < R; ++r) {
    const float total = simd_sum(sums[r]);
    if (lane == 0) {
      z[uint(r) * z_stride] = total;
    }
  }
}
//! body
const uint lane = thread_index_in_simdgroup;
const uint rank = threadgroup_position_in_grid.y, part = threadgroup_position_in_grid.z;
const uint z_stride = PARTS * threadgroups_per_grid.y;
const int first = int(threadgroup_position_in_grid.x) * ROWS, count = min(ROWS, x_shape[0] - first);
const bool together = count == ROWS && share_slot(slots, first, count);
for (int row = first; row < first + count; row += together ? ROWS : 1) {
  const device int* const place = place_of(places, slots[row], part);
  const int num_rows = together ? ROWS : 1;
  device float* const to = z + uint(row) * z_stride + part * threadgroups_per_grid.y + rank;
  if (rank >= uint(place[2])) {  // uniform across the simdgroup
    if (lane < uint(num_rows)) {
      to[lane * z_stride] = 0.0f;
    }
  } else {
    const device auto* const factors = a + ulong(uint(place[0]) + rank) * INPUTS;
    const device auto* const rows = x + ulong(uint(row)) * INPUTS;
    if (together) {
      multiply<ROWS>(rows, factors, lane, to, z_stride);
    } else {
      multiply<1>(rows, factors, lane, to, z_stride);
    }
  }
}
