// K and V of sequences as MLX's own attention takes them: dequantized, rotated back, one key after the other.
//   grid: (runs of keys, KV heads, K or V); a run is (its first row of the outputs, keys, sequence, first position)
//   keys [rows, KV heads, HEAD_DIM], values [rows, KV heads, VALUE_DIM], of the type of the queries
// A lane has an octet of a row, as pages are read elsewhere; a simdgroup has as many rows as it has lanes for.

template <typename Format, int D, uint LANES, bool ROTATES, typename T>
METAL_FUNC void fill_rows(
    const device typename Format::Code* codes, const device typename Format::Scale* scales, float norm,
    const device int* table, const device int* run, uint kv_head, uint simd_index, uint lane, device T* out) {
  constexpr uint AT_ONCE = 32 / LANES;
  const uint octet = lane % LANES, count = uint(run[1]);
  const bool reads = octet < D / 8;
  for (uint first = simd_index * AT_ONCE; first < count; first += NUM_SIMDGROUPS * AT_ONCE) {
    const uint key = min(first + lane / LANES, count - 1);  // shuffles need every lane: the last row again
    const uint position = uint(run[3]) + key;
    const uint page = uint(table[position / PAGE_SIZE]);
    const uint row = (page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + position % PAGE_SIZE;
    float4 low, high;
    Format::unpack(load_octet<Format, D>(codes, scales, row, reads ? octet : 0u), low, high);
    Format::template scale_octet<D>(scales, row, octet, lane, reads, low, high);
    const float scale = Format::template row_scale<D>(scales, row);
    float x[8];
    UNROLL
    for (int i = 0; i < 4; ++i) {
      x[i] = low[i] * scale;
      x[i + 4] = high[i] * scale;
    }
    if (ROTATES) {
      hadamard<D, 8>(x, octet, norm);
    }
    if (reads && first + lane / LANES < count) {
      device T* const to = out + (ulong(uint(run[0]) + key) * NUM_KV_HEADS + kv_head) * D + octet * 8;
      UNROLL
      for (int i = 0; i < 8; ++i) {
        to[i] = T(x[i]);
      }
    }
  }
}
//! body
#if ORDERED
if (threadgroup_position_in_grid.x == 0 && threadgroup_position_in_grid.y == 0 &&
    threadgroup_position_in_grid.z == 0 && thread_index_in_threadgroup < 8) {
  read[thread_index_in_threadgroup] = true;
}
#endif
const uint lane = thread_index_in_simdgroup, simd_index = simdgroup_index_in_threadgroup;
const uint kv_head = threadgroup_position_in_grid.y;
const device int* const run = runs + 4 * threadgroup_position_in_grid.x;
const device int* const table = page_table + uint(run[2]) * uint(page_table_shape[1]);
if (threadgroup_position_in_grid.z == 0) {  // the whole threadgroup
  fill_rows<Keys, HEAD_DIM, KEY_LANES, ROTATE_KEYS>(
      k_codes, KEY_SCALES, as_type<float>(KEY_NORM_BITS), table, run, kv_head, simd_index, lane, keys);
} else {
  fill_rows<Values, VALUE_DIM, VALUE_LANES, ROTATE_VALUES>(
      v_codes, VALUE_SCALES, as_type<float>(VALUE_NORM_BITS), table, run, kv_head, simd_index, lane, values);
}
