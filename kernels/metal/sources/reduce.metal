// Join the splits of a row: one simdgroup per (row, query head).
//   rows [R, 4]: (first item, number of items, -, -); partial [items, heads, VALUE_DIM] weighted
//   values and stats [items, heads, 4] (largest logit, sum of weights, -, -) of each split
//! body
const uint lane = thread_index_in_simdgroup;
const uint head = thread_position_in_grid.y, row = thread_position_in_grid.z;
const uint first = rows[4 * row], count = rows[4 * row + 1];
float joint = LOWEST;
for (uint s = 0; s < count; ++s) {
  joint = max(joint, stats[4 * (ulong(first + s) * NUM_HEADS + head)]);
}
float total = 0.0f;
float x[VALUE_LANE];
for (uint i = 0; i < VALUE_LANE; ++i) {
  x[i] = 0.0f;
}
for (uint s = 0; s < count; ++s) {
  const ulong at = ulong(first + s) * NUM_HEADS + head;
  const float share = fast::exp2(stats[4 * at] - joint);
  float part[VALUE_LANE];
  load_row<VALUE_DIM, VALUE_LANE>(partial + at * VALUE_DIM, lane, part);
  total += stats[4 * at + 1] * share;
  for (uint i = 0; i < VALUE_LANE; ++i) {
    x[i] += part[i] * share;
  }
}
write_output(x, normalizer(joint, total, SINK(head)), lane, out + (ulong(row) * NUM_HEADS + head) * VALUE_DIM);
