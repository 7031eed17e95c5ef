// Conversion of rows of K or V to a page format; one simdgroup per row.
//   rows [R, DIM]  ->  codes [R, ...], scales [R] if the format has them, storable [R]
//! body
const uint lane = thread_index_in_simdgroup;
const uint row = threadgroup_position_in_grid.x * NUM_SIMDGROUPS + simdgroup_index_in_threadgroup;
if (row >= uint(rows_shape[0])) {
  return;  // uniform across the simdgroup
}
float x[LANE_DIM];
load_row<DIM, LANE_DIM>(rows + ulong(row) * DIM, lane, x);
#if ROTATE
hadamard<DIM, LANE_DIM>(x, lane, as_type<float>(NORM_BITS));
#endif
const bool finite = Format::store<DIM, LANE_DIM>(x, lane, row, codes, SCALES);
if (lane == 0) {
  storable[row] = finite;
}
