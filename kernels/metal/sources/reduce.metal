// Joins the splits of each row (partial results over some of its keys): one threadgroup per row and query
// head, in which each simdgroup adds up every NUM_SIMDGROUPS-th split.
//   rows [R, 4]: (first item, number of items, -, -); partial [items, heads, VALUE_DIM]: weighted
//   values, and stats [items, heads, 4]: (largest logit, sum of weights, -, -) of each split
// A row with one split gets exactly the result that decode would have written, because its factor is exactly
// 1.
//! body
threadgroup float shared_rows[NUM_SIMDGROUPS * VALUE_DIM];
const uint lane = thread_index_in_simdgroup, simd_index = simdgroup_index_in_threadgroup;
const uint head = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
const uint first = rows[4 * row], count = rows[4 * row + 1];
float joint = LOWEST;
for (uint s = lane; s < count; s += 32) {
  joint = max(joint, stats[4 * ((first + s) * NUM_HEADS + head)]);
}
joint = simd_max(joint);
float x[VALUE_LANE];
UNROLL
for (uint i = 0; i < VALUE_LANE; ++i) {
  x[i] = 0.0f;
}
for (uint s = simd_index; s < count; s += NUM_SIMDGROUPS) {
  const uint at = (first + s) * NUM_HEADS + head;
  const float top = stats[4 * at];
  const float share = top == joint ? 1.0f : fast::exp2(top - joint);
  float part[VALUE_LANE];
  load_row<VALUE_DIM, VALUE_LANE>(partial + at * VALUE_DIM, lane, part);
  UNROLL
  for (uint i = 0; i < VALUE_LANE; ++i) {
    x[i] += part[i] * share;
  }
}
UNROLL
for (uint i = 0; i < VALUE_LANE; ++i) {
  if (lane * VALUE_LANE + i < VALUE_DIM) {
    shared_rows[simd_index * VALUE_DIM + lane * VALUE_LANE + i] = x[i];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // the sums of all simdgroups are stored
if (simd_index > 0) {
  return;  // uniform across the simdgroup
}
float total = 0.0f;
for (uint s = lane; s < count; s += 32) {
  const uint at = (first + s) * NUM_HEADS + head;
  total += stats[4 * at + 1] * (stats[4 * at] == joint ? 1.0f : fast::exp2(stats[4 * at] - joint));
}
total = simd_sum(total);
AS_LOOP
for (uint s = 1; s < NUM_SIMDGROUPS; ++s) {
  float part[VALUE_LANE];
  load_row<VALUE_DIM, VALUE_LANE>(shared_rows + s * VALUE_DIM, lane, part);
  UNROLL
  for (uint i = 0; i < VALUE_LANE; ++i) {
    x[i] += part[i];
  }
}
write_output(x, normalizer(joint, total, SINK(head)), lane, out + (row * NUM_HEADS + head) * VALUE_DIM);
