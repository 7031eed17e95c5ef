// A tile of query rows of one sequence against its keys, on 8x8 matrices. A tile's rows are
// TOKENS consecutive tokens times the GROUP query heads of one KV head, so K and V are read and
// dequantized once for all of them; a simdgroup owns 8 rows.
//   grid: (tiles, KV heads); a tile is (first row, tokens, sequence, first row of the output)
// Matrices are only loaded, multiplied and stored: nothing depends on which lane holds what.

// Keys start..start + KEYS of K or of V into a padded threadgroup tile; unused rows are zeros.
// A simdgroup takes part as a whole in each turn: KEYS times an even number of octets is a multiple of 32.
template <typename Format, int D>
METAL_FUNC void load_tile(
    const device typename Format::Code* codes, const device typename Format::Scale* scales,
    threadgroup const uint* key_rows, threadgroup typename Format::Tile* tile, uint thread_index) {
  constexpr uint octets = D / 8;
  for (uint unit = thread_index; unit < KEYS * octets; unit += 32 * NUM_SIMDGROUPS) {
    const uint key = unit / octets, octet = unit % octets;
    float4 low = float4(0.0f), high = float4(0.0f);
    if (key_rows[key] != UNUSED) {
      Format::unpack(load_octet<Format, D>(codes, scales, key_rows[key], octet), low, high);
    }
    Format::template scale_octet<D>(
        scales, key_rows[key], octet, thread_index % 32, key_rows[key] != UNUSED, low, high);
    threadgroup typename Format::Tile* const to = tile + key * (D + 8) + octet * 8;
    for (uint i = 0; i < 4; ++i) {
      to[i] = typename Format::Tile(low[i]);
      to[i + 4] = typename Format::Tile(high[i]);
    }
  }
}
//! body
constexpr uint WEIGHT_STRIDE = KEYS + 4;
constexpr uint QUERY_STRIDE = HEAD_DIM + 4, OUT_STRIDE = VALUE_DIM + 4;
threadgroup float shared_tile[SHARED_FLOATS];  // queries, then K and V tiles in turn, then the output
threadgroup float all_weights[NUM_SIMDGROUPS * 8 * KEYS + NUM_SIMDGROUPS * 32];
threadgroup float diagonals[NUM_SIMDGROUPS * 64];
threadgroup uint key_rows[KEYS];
threadgroup float key_scales[KEYS];
threadgroup float value_scales[KEYS];

const uint lane = thread_index_in_simdgroup, simd_index = simdgroup_index_in_threadgroup;
const uint thread_index = thread_index_in_threadgroup;
const uint kv_head = threadgroup_position_in_grid.y, first_head = kv_head * GROUP;
const uint first_row = tiles[4 * threadgroup_position_in_grid.x], tokens = tiles[4 * threadgroup_position_in_grid.x + 1];
const uint sequence = tiles[4 * threadgroup_position_in_grid.x + 2];
const uint out_row = tiles[4 * threadgroup_position_in_grid.x + 3];
const int first_position = positions[first_row], last_position = positions[first_row + tokens - 1];

simdgroup_float8x8 query[HEAD_DIM / 8];
for (uint i = 0; i < 8; ++i) {
  const uint r = simd_index * 8 + i, token = r / GROUP;
  float x[KEY_LANE];
  for (uint j = 0; j < KEY_LANE; ++j) {
    x[j] = 0.0f;
  }
  if (token < tokens) {
    load_row<HEAD_DIM, KEY_LANE>(
        queries + (ulong(first_row + token) * NUM_HEADS + first_head + r % GROUP) * HEAD_DIM, lane, x);
  }
#if ROTATE_KEYS
  hadamard<HEAD_DIM, KEY_LANE>(x, lane, as_type<float>(KEY_NORM_BITS));
#endif
  for (uint j = 0; j < KEY_LANE; ++j) {
    if (lane * KEY_LANE + j < HEAD_DIM) {
      shared_tile[r * QUERY_STRIDE + lane * KEY_LANE + j] = x[j] * params[0];
    }
  }
}
simdgroup_barrier(mem_flags::mem_threadgroup);
for (uint k = 0; k < HEAD_DIM / 8; ++k) {
  simdgroup_load(query[k], shared_tile + simd_index * 8 * QUERY_STRIDE + k * 8, QUERY_STRIDE);
}
simdgroup_float8x8 output[VALUE_DIM / 8];
for (uint n = 0; n < VALUE_DIM / 8; ++n) {
  output[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
threadgroup float* const weights = all_weights + simd_index * 8 * WEIGHT_STRIDE;
threadgroup float* const diagonal = diagonals + simd_index * 64;
diagonal[lane] = 0.0f;
diagonal[lane + 32] = 0.0f;

// In the softmax, four lanes share a row.
const uint my_row = simd_index * 8 + lane / 4, my_token = my_row / GROUP, my_head = first_head + my_row % GROUP;
const int my_position = my_token < tokens ? positions[first_row + my_token] : -1;
float top = LOWEST, sum = 0.0f;
threadgroup typename Keys::Tile* const key_tile = (threadgroup typename Keys::Tile*)shared_tile;
threadgroup typename Values::Tile* const value_tile = (threadgroup typename Values::Tile*)shared_tile;
const Span span = span_from<KEYS>(first_position);
const int num_tiles = last_position / KEYS + 1 - span.window + span.kept;

for (int index = 0; index < num_tiles; ++index) {
  const int start = span.tile(index) * KEYS;
  if (thread_index < KEYS) {
    const int key = start + int(thread_index);
    bool used = key <= last_position;
#if WINDOW
    used = used && (key > first_position - WINDOW || key < KEEP);
#endif
    uint source = UNUSED;
    float key_scale = 0.0f, value_scale = 0.0f;
    if (used) {
      const uint page = uint(page_table[sequence * uint(page_table_shape[1]) + uint(key) / PAGE_SIZE]);
      source = (page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + uint(key) % PAGE_SIZE;
      key_scale = Keys::row_scale<HEAD_DIM>(KEY_SCALES, source);
      value_scale = Values::row_scale<VALUE_DIM>(VALUE_SCALES, source);
    }
    key_rows[thread_index] = source;
    key_scales[thread_index] = key_scale;
    value_scales[thread_index] = value_scale;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // also: the queries or the last V tile are done with
  load_tile<Keys, HEAD_DIM>(k_codes, KEY_SCALES, key_rows, key_tile, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  simdgroup_float8x8 products[KEYS / 8];
  for (uint c = 0; c < KEYS / 8; ++c) {
    products[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (uint k = 0; k < HEAD_DIM / 8; ++k) {
    for (uint c = 0; c < KEYS / 8; ++c) {
      simdgroup_matrix<typename Keys::Tile, 8, 8> keys;
      simdgroup_load(keys, key_tile + c * 8 * (HEAD_DIM + 8) + k * 8, HEAD_DIM + 8, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(products[c], query[k], keys, products[c]);
    }
  }
  for (uint c = 0; c < KEYS / 8; ++c) {
    simdgroup_store(products[c], weights + c * 8, WEIGHT_STRIDE);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // products are stored, and the K tile is done with

  load_tile<Values, VALUE_DIM>(v_codes, VALUE_SCALES, key_rows, value_tile, thread_index);
  float logits[KEYS / 4];
  float new_top = top;
  for (uint j = 0; j < KEYS / 4; ++j) {
    const uint c = lane % 4 + 4 * j;
    const int key = start + int(c);
    logits[j] = LOWEST;
    if (is_visible(key, my_position)) {
      logits[j] = logit(
          weights[lane / 4 * WEIGHT_STRIDE + c] * key_scales[c], params, SLOPE(my_head), key, my_position);
    }
    new_top = max(new_top, logits[j]);
  }
  new_top = max(new_top, simd_shuffle_xor(new_top, 1));
  new_top = max(new_top, simd_shuffle_xor(new_top, 2));
  const float factor = fast::exp2(top - new_top);
  top = new_top;
  sum *= factor;
  for (uint j = 0; j < KEYS / 4; ++j) {
    const uint c = lane % 4 + 4 * j;
    const float weight = is_visible(start + int(c), my_position) ? fast::exp2(logits[j] - new_top) : 0.0f;
    sum += weight;
    weights[lane / 4 * WEIGHT_STRIDE + c] = weight * value_scales[c];
  }
  if (lane % 4 == 0) {
    diagonal[lane / 4 * 9] = factor;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the V tile is loaded, the weights are stored

  if (simd_any(factor != 1.0f)) {
    simdgroup_float8x8 factors;
    simdgroup_load(factors, diagonal, 8);
    for (uint n = 0; n < VALUE_DIM / 8; ++n) {
      simdgroup_multiply(output[n], factors, output[n]);
    }
  }
  for (uint c = 0; c < KEYS / 8; ++c) {
    simdgroup_float8x8 shares;
    simdgroup_load(shares, weights + c * 8, WEIGHT_STRIDE);
    for (uint n = 0; n < VALUE_DIM / 8; ++n) {
      simdgroup_matrix<typename Values::Tile, 8, 8> values;
      simdgroup_load(values, value_tile + c * 8 * (VALUE_DIM + 8) + n * 8, VALUE_DIM + 8);
      simdgroup_multiply_accumulate(output[n], shares, values, output[n]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next tile overwrites rows, scales and V
}

for (uint n = 0; n < VALUE_DIM / 8; ++n) {
  simdgroup_store(output[n], shared_tile + simd_index * 8 * OUT_STRIDE + n * 8, OUT_STRIDE);
}
simdgroup_barrier(mem_flags::mem_threadgroup);
sum += simd_shuffle_xor(sum, 1);
sum += simd_shuffle_xor(sum, 2);
for (uint i = 0; i < 8; ++i) {
  const uint r = simd_index * 8 + i, token = r / GROUP;
  const float row_top = simd_shuffle(top, ushort(4 * i)), row_sum = simd_shuffle(sum, ushort(4 * i));
  if (token < tokens) {  // the whole simdgroup
    float x[VALUE_LANE];
    load_row<VALUE_DIM, VALUE_LANE>(shared_tile + r * OUT_STRIDE, lane, x);
    write_output(
        x, normalizer(row_top, row_sum, SINK(first_head + r % GROUP)), lane,
        out + (ulong(out_row + token) * NUM_HEADS + first_head + r % GROUP) * VALUE_DIM);
  }
}
