// As quantize.metal, but each row goes to its place in the pool: an input, written all the same.
// MLX does not see that: whoever reads the pages takes `storable` as an input, and `after` is what
// the last reader made.
//   rows [R, DIM], targets [>= R] rows of the pool  ->  storable [>= R]
//! body
const uint lane = thread_index_in_simdgroup;
const uint row = threadgroup_position_in_grid.x * NUM_SIMDGROUPS + simdgroup_index_in_threadgroup;
if (row >= uint(rows_shape[0])) {  // the whole simdgroup
  if (lane == 0) {
    storable[row] = true;
  }
  return;
}
float x[LANE_DIM];
load_row<DIM, LANE_DIM>(rows + ulong(row) * DIM, lane, x);
#if ROTATE
hadamard<DIM, LANE_DIM>(x, lane, as_type<float>(NORM_BITS));
#endif
const bool finite = Format::store<DIM, LANE_DIM>(
    x, lane, uint(targets[row]), (device Format::Code*)codes, (device Format::Scale*)SCALES);
if (lane == 0) {
  storable[row] = finite;
}
