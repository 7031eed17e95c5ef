// Converts rows of K and V to their page format and writes them to the pool; one threadgroup per token, one
// simdgroup per row.
//   keys [T, KV heads, KEY_DIM], values [T, KV heads, VALUE_DIM], targets [>= T * KV heads]: rows of the pool,
//   flagged [>= T]  ->  written [>= T]: true if a row of the token cannot be stored, or if the token was flagged
// The kernel writes to its inputs without MLX knowing. So the next kernel that reads or writes the pages
// takes `written` as an input, and this kernel takes `after`, the output of the last kernel on these pages.

template <typename Format, int D, int E, bool ROTATES, typename Row>
METAL_FUNC bool write_row(
    const device Row* source, uint lane, float norm, uint target, const device typename Format::Code* codes,
    const device typename Format::Scale* scales) {
  float x[E];
  load_row<D, E>(source, lane, x);
  if (ROTATES) {
    hadamard<D, E>(x, lane, norm);
  }
  return Format::template store<D, E>(
      x, lane, target, (device typename Format::Code*)codes, (device typename Format::Scale*)scales);
}
//! body
threadgroup bool failures[MAX_SIMDGROUPS];
const uint lane = thread_index_in_simdgroup, simd_index = simdgroup_index_in_threadgroup;
const uint token = threadgroup_position_in_grid.x, heads = uint(keys_shape[1]);
if (token >= uint(keys_shape[0])) {  // uniform across the threadgroup
  if (simd_index == 0 && lane == 0) {
    written[token] = false;
  }
  return;
}
const device Keys::Scale* const key_scale_rows = KEY_SCALES;
const device Values::Scale* const value_scale_rows = VALUE_SCALES;
bool finite = true;
for (uint i = simd_index; i < 2 * heads; i += simdgroups_per_threadgroup) {
  const uint row = token * heads + i % heads;
  const uint target = uint(targets[row]);
  if (i < heads) {  // uniform across the simdgroup
    finite = write_row<Keys, KEY_DIM, KEY_LANE, ROTATE_KEYS>(
        keys + ulong(row) * KEY_DIM, lane, as_type<float>(KEY_NORM_BITS), target, k_codes, key_scale_rows) && finite;
  } else {
    finite = write_row<Values, VALUE_DIM, VALUE_LANE, ROTATE_VALUES>(
        values + ulong(row) * VALUE_DIM, lane, as_type<float>(VALUE_NORM_BITS), target, v_codes, value_scale_rows) &&
        finite;
  }
}
if (lane == 0) {
  failures[simd_index] = !finite;
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // all rows are stored
if (simd_index == 0 && lane == 0) {
  bool failed = flagged[token];
  for (uint i = 0; i < simdgroups_per_threadgroup; ++i) {
    failed = failed || failures[i];
  }
  written[token] = failed;
}
