// Prefill: a tile of query rows of one sequence attends to its keys, with 8x8 matrices. A tile's rows are
// consecutive tokens times the GROUP query heads of one KV head, so one tile reads and dequantizes K and V
// once.
//   grid: (tiles, KV heads). A tile is (first row, tokens, sequence, number of tiles) or, with SPLIT,
//   (first row, tokens, sequence, first output row). Without SPLIT, further entries follow the tiles:
//   (row of `decoded`, 0, 0, output row) copies a row that another kernel has computed.
//   A simdgroup has 8 rows. If rows are wide, PARTS = 2 simdgroups have 8 rows, each half of their width.
// The loop has two phases for KEYS keys, each ended by a barrier. First, queries and K are multiplied while V
// is loaded. Then softmax and weighted sums of V are computed while the next K is loaded. With VALUES_FIRST,
// V is expanded before the products, because both together would need too many registers. Logits and weights
// stay in matrix registers (tile.metal).
//! body
typedef Filling<Keys, HEAD_DIM, AHEAD_BYTES> KeyFilling;
typedef Filling<Values, VALUE_DIM, AHEAD_BYTES> ValueFilling;
constexpr uint ROW_GROUPS = NUM_SIMDGROUPS / PARTS;
constexpr uint KEY_MATRICES = HEAD_DIM / 8, VALUE_MATRICES = VALUE_DIM / 8;
constexpr uint MY_KEY_MATRICES = (KEY_MATRICES + PARTS - 1) / PARTS;
constexpr uint MY_VALUE_MATRICES = (VALUE_MATRICES + PARTS - 1) / PARTS;
constexpr uint NUM_PART_PRODUCTS = PARTS == 2 ? NUM_SIMDGROUPS * KEYS / 8 * 32 : 1;
constexpr uint QUERY_STRIDE = HEAD_DIM + 4, OUT_STRIDE = VALUE_DIM + 4;
// first queries of STAGED row groups; then K and V; finally outputs
threadgroup float4 shared_quads[SHARED_QUADS];
threadgroup KeyRow key_rows[2 * KEYS];  // of this tile and of the next
threadgroup float2 part_products[NUM_PART_PRODUCTS];

if (threadgroup_position_in_grid.x == 0 && threadgroup_position_in_grid.y == 0 && thread_index_in_threadgroup < 8) {
  read[thread_index_in_threadgroup] = true;
}
#if !SPLIT
if (threadgroup_position_in_grid.x >= uint(tiles[3])) {  // uniform across the threadgroup
  const uint from = tiles[4 * threadgroup_position_in_grid.x] * NUM_KV_HEADS + threadgroup_position_in_grid.y;
  const uint to = tiles[4 * threadgroup_position_in_grid.x + 3] * NUM_KV_HEADS + threadgroup_position_in_grid.y;
  for (uint i = thread_index_in_threadgroup; i < GROUP * VALUE_DIM; i += THREADS) {
    out[to * (GROUP * VALUE_DIM) + i] = decoded[from * (GROUP * VALUE_DIM) + i];
  }
  return;
}
#endif
const uint lane = thread_index_in_simdgroup, simd_index = simdgroup_index_in_threadgroup;
const uint thread_index = thread_index_in_threadgroup;
const uint row_group = simd_index / PARTS, part = simd_index % PARTS;
const uint kv_head = threadgroup_position_in_grid.y, first_head = kv_head * GROUP;
const uint first_row = tiles[4 * threadgroup_position_in_grid.x], tokens = tiles[4 * threadgroup_position_in_grid.x + 1];
const uint sequence = tiles[4 * threadgroup_position_in_grid.x + 2];
#if SPLIT
const uint out_row = tiles[4 * threadgroup_position_in_grid.x + 3];
#else
const uint out_row = first_row;
#endif
const int last_position = positions[first_row + tokens - 1], since = SINCE(first_row, positions[first_row]);
const device int* const table = page_table + sequence * uint(page_table_shape[1]);
const device Keys::Scale* const key_scale_rows = KEY_SCALES;
const device Values::Scale* const value_scale_rows = VALUE_SCALES;
threadgroup float* const staged = (threadgroup float*)shared_quads;
threadgroup Keys::Tile* const key_tile = (threadgroup Keys::Tile*)shared_quads;
threadgroup Values::Tile* const value_tile = (threadgroup Values::Tile*)(shared_quads + KEY_QUADS);
const Span span = span_from<KEYS>(since);
const int num_tiles = last_position / KEYS + 1 - span.window + span.kept;

find_rows<HEAD_DIM, VALUE_DIM>(
    table, key_scale_rows, value_scale_rows, kv_head, span.tile(0) * KEYS, since, last_position, thread_index,
    key_rows);

simdgroup_float8x8 query[MY_KEY_MATRICES];
UNROLL
for (uint turn = 0; turn < ROW_GROUPS; turn += STAGED) {
  const bool mine = row_group >= turn && row_group < turn + STAGED;  // uniform across the simdgroup
  threadgroup float* const rows = staged + (row_group - turn) * 8 * QUERY_STRIDE;
  for (uint i = part; mine && i < 8; i += PARTS) {
    const uint r = row_group * 8 + i, token = r / GROUP;
    float x[KEY_LANE];
    UNROLL
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
    UNROLL
    for (uint j = 0; j < KEY_LANE; ++j) {
      if (lane * KEY_LANE + j < HEAD_DIM) {
        rows[i * QUERY_STRIDE + lane * KEY_LANE + j] = x[j] * params[0];
      }
    }
  }
  // queries are staged, and key_rows of the first tile are known
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (mine) {
    UNROLL
    for (uint k = 0; k < MY_KEY_MATRICES; ++k) {
      const uint at = part * MY_KEY_MATRICES + k;
      if (at < KEY_MATRICES) {
        simdgroup_load(query[k], rows + at * 8, QUERY_STRIDE);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next row groups or K overwrite the staged queries
}
simdgroup_float8x8 output[MY_VALUE_MATRICES];
UNROLL
for (uint n = 0; n < MY_VALUE_MATRICES; ++n) {
  output[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

const uint my_row = row_group * 8 + row_of(lane), my_token = my_row / GROUP;
const int my_position = my_token < tokens ? positions[first_row + my_token] : -1;
const int my_since = SINCE(first_row + min(my_token, tokens - 1), my_position);
// This is uniform across the simdgroup. All simdgroups take part in loads.
const bool has_rows = row_group * 8 < tokens * GROUP;
float top = LOWEST, sum = 0.0f;
{
  KeyFilling::Raw raws[KeyFilling::TURNS];
  KeyFilling::start(k_codes, key_scale_rows, key_rows, thread_index, raws);
  KeyFilling::finish(k_codes, key_scale_rows, key_rows, key_tile, thread_index, raws);
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // the first tile of K is loaded

for (int index = 0; index < num_tiles; ++index) {
  const int start = span.tile(index) * KEYS;
  const uint now = uint(index) % 2 * KEYS, next = KEYS - now;
  const bool is_last = index + 1 == num_tiles;
  simdgroup_float8x8 products[KEYS / 8];
  {
    ValueFilling::Raw raws[ValueFilling::TURNS];
    ValueFilling::start(v_codes, value_scale_rows, key_rows + now, thread_index, raws);
    if (!is_last) {
      find_rows<HEAD_DIM, VALUE_DIM>(
          table, key_scale_rows, value_scale_rows, kv_head, span.tile(index + 1) * KEYS, since, last_position,
          thread_index, key_rows + next);
    }
#if VALUES_FIRST
    ValueFilling::finish(v_codes, value_scale_rows, key_rows + now, value_tile, thread_index, raws);
    KEEP_ORDER
#endif
    UNROLL
    for (uint c = 0; c < KEYS / 8; ++c) {
      products[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    if (has_rows) {
      UNROLL
      for (uint k = 0; k < MY_KEY_MATRICES; ++k) {
        const uint at = part * MY_KEY_MATRICES + k;
        KEEP_ORDER
        UNROLL
        for (uint c = 0; at < KEY_MATRICES && c < KEYS / 8; ++c) {
          simdgroup_matrix<Keys::Tile, 8, 8> keys;
          simdgroup_load(
              keys, key_tile + c * 8 * KeyFilling::STRIDE + at * 8, KeyFilling::STRIDE, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(products[c], query[k], keys, products[c]);
        }
      }
    }
#if !VALUES_FIRST
    ValueFilling::finish(v_codes, value_scale_rows, key_rows + now, value_tile, thread_index, raws);
#endif
  }
#if PARTS == 2
  UNROLL
  for (uint c = 0; c < KEYS / 8; ++c) {
    part_products[(simd_index * (KEYS / 8) + c) * 32 + lane] =
        float2(products[c].thread_elements()[0], products[c].thread_elements()[1]);
  }
#endif
  // V and the next key_rows are stored, and K may be overwritten
  threadgroup_barrier(mem_flags::mem_threadgroup);

  KeyFilling::Raw raws[KeyFilling::TURNS];
  if (!is_last) {
    KeyFilling::start(k_codes, key_scale_rows, key_rows + next, thread_index, raws);
  }
  if (has_rows) {
    float new_top = top;
    UNROLL
    for (uint c = 0; c < KEYS / 8; ++c) {
#if PARTS == 2
      const float2 others = part_products[((simd_index ^ 1u) * (KEYS / 8) + c) * 32 + lane];
#else
      const float2 others = float2(0.0f);
#endif
      UNROLL
      for (uint i = 0; i < 2; ++i) {
        const uint column = c * 8 + column_of(lane) + i;
        const int key = start + int(column);
        float x = LOWEST;
        if (is_visible(key, my_position, my_since)) {
          const float product = products[c].thread_elements()[i] + others[i];
          x = logit(product * key_rows[now + column].key_scale, params);
        }
        products[c].thread_elements()[i] = x;
        new_top = max(new_top, x);
      }
    }
    new_top = max(new_top, simd_shuffle_xor(new_top, 1));
    new_top = max(new_top, simd_shuffle_xor(new_top, 8));
    const float factor = fast::exp2(top - new_top);
    top = new_top;
    sum *= factor;
    UNROLL
    for (uint n = 0; n < MY_VALUE_MATRICES; ++n) {
      output[n].thread_elements()[0] *= factor;
      output[n].thread_elements()[1] *= factor;
    }
    UNROLL
    for (uint c = 0; c < KEYS / 8; ++c) {
      UNROLL
      for (uint i = 0; i < 2; ++i) {
        const uint column = c * 8 + column_of(lane) + i;
        const bool visible = is_visible(start + int(column), my_position, my_since);
        const float weight = visible ? fast::exp2(products[c].thread_elements()[i] - new_top) : 0.0f;
        sum += weight;  // only this lane's columns; joined after the loop
        products[c].thread_elements()[i] = weight * key_rows[now + column].value_scale;
      }
    }
    UNROLL
    for (uint n = 0; n < MY_VALUE_MATRICES; ++n) {
      const uint at = part * MY_VALUE_MATRICES + n;
      KEEP_ORDER
      UNROLL
      for (uint c = 0; at < VALUE_MATRICES && c < KEYS / 8; ++c) {
        simdgroup_matrix<Values::Tile, 8, 8> values;
        simdgroup_load(values, value_tile + c * 8 * ValueFilling::STRIDE + at * 8, ValueFilling::STRIDE);
        simdgroup_multiply_accumulate(output[n], products[c], values, output[n]);
      }
    }
  }
  if (!is_last) {
    KeyFilling::finish(k_codes, key_scale_rows, key_rows + next, key_tile, thread_index, raws);
  }
  // the next K is stored; V and part_products may be overwritten
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

sum += simd_shuffle_xor(sum, 1);
sum += simd_shuffle_xor(sum, 8);
UNROLL
for (uint turn = 0; turn < ROW_GROUPS; turn += STAGED) {
  // uniform across the simdgroup
  const bool mine = has_rows && row_group >= turn && row_group < turn + STAGED;
  threadgroup float* const rows = staged + (row_group - turn) * 8 * OUT_STRIDE;
  if (mine) {
    UNROLL
    for (uint n = 0; n < MY_VALUE_MATRICES; ++n) {
      const uint at = part * MY_VALUE_MATRICES + n;
      if (at < VALUE_MATRICES) {
        simdgroup_store(output[n], rows + at * 8, OUT_STRIDE);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // outputs are staged
  for (uint i = part; mine && i < 8; i += PARTS) {
    const uint r = row_group * 8 + i, token = r / GROUP;
    const float row_top = simd_shuffle(top, ushort(lane_of(i))), row_sum = simd_shuffle(sum, ushort(lane_of(i)));
    if (token < tokens) {  // uniform across the simdgroup
      float x[VALUE_LANE];
      load_row<VALUE_DIM, VALUE_LANE>(rows + i * OUT_STRIDE, lane, x);
      const uint at = (out_row + token) * NUM_HEADS + first_head + r % GROUP;
#if SPLIT
      write_part(x, row_top, row_sum, lane, at, partial, stats);
#else
      write_output(x, normalizer(row_top, row_sum, SINK(first_head + r % GROUP)), lane, out + ulong(at) * VALUE_DIM);
#endif
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next row groups overwrite the staged outputs
}
