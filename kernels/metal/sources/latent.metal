// Attention over latents (MLA), for decoding and prefill. Pages have one head: its K rows are latents, which
// are also the values, and its V rows are rotary keys. A query row is one query head of one token, with a
// query for latents and one for rotary keys. Rows are ordered by token, then by head.
//   grid: (items); an item is (the token's row in the step, its first head, rows, sequence, output of the first
//         token, first and end of its tiles of 32 keys, -)
//   PARTS simdgroups have 8 rows, each a part of the width of queries, latents and outputs
// The loop has three phases for KEYS keys, each ended by a barrier: products over each part of the width;
// softmax and weighted sums of latents, while the next codes are loaded; expansion of these codes. Logits are
// summed over the parts in a fixed order, so that they are bit-identical in all parts. A row's result depends
// only on the row and its split of the keys.
//! body
typedef Filling<Keys, HEAD_DIM> LatentFilling;
typedef Filling<Values, ROTARY_DIM, 4> RotaryFilling;
constexpr uint ROW_GROUPS = NUM_SIMDGROUPS / PARTS;
constexpr uint MATRICES = HEAD_DIM / 8, MY_MATRICES = (MATRICES + PARTS - 1) / PARTS;
constexpr uint ROTARY_MATRICES = ROTARY_DIM / 8, MY_ROTARY_MATRICES = (ROTARY_MATRICES + PARTS - 1) / PARTS;
constexpr uint QUERY_STRIDE = HEAD_DIM + ROTARY_DIM + 4, OUT_STRIDE = HEAD_DIM + 4;
constexpr int STEPS = 32 / KEYS;
// first queries of one row group; then latents and rotary keys; finally outputs
threadgroup float4 shared_quads[SHARED_QUADS];
threadgroup KeyRow key_rows[2 * KEYS];  // of the current keys and of the next keys
threadgroup float2 part_products[NUM_SIMDGROUPS * KEYS / 8 * 32];

const uint lane = thread_index_in_simdgroup, simd_index = simdgroup_index_in_threadgroup;
const uint thread_index = thread_index_in_threadgroup;
if (threadgroup_position_in_grid.x == 0 && thread_index < 8) {
  read[thread_index] = true;
}
const uint row_group = simd_index / PARTS, part = simd_index % PARTS;
const device int* const item = items + 8 * threadgroup_position_in_grid.x;
const uint first_row = uint(item[0]), skipped = uint(item[1]), count = uint(item[2]), sequence = uint(item[3]);
const uint out_row = uint(item[4]);
const int since = SINCE(first_row, positions[first_row]);
const int last_position = positions[first_row + (skipped + count - 1) / NUM_HEADS];
const device int* const table = page_table + sequence * uint(page_table_shape[1]);
const device Keys::Scale* const key_scale_rows = KEY_SCALES;
const device Values::Scale* const value_scale_rows = VALUE_SCALES;
threadgroup float* const staged = (threadgroup float*)shared_quads;
threadgroup Keys::Tile* const latent_tile = (threadgroup Keys::Tile*)shared_quads;
threadgroup Values::Tile* const rotary_tile = (threadgroup Values::Tile*)(shared_quads + LATENT_QUADS);
const Span span = span_from<32>(since);
const int end = min(item[6], last_position / 32 + 1 - span.window + span.kept) * STEPS;
int index = item[5] * STEPS, start = span.tile(item[5]) * 32;

find_rows<HEAD_DIM, ROTARY_DIM>(
    table, key_scale_rows, value_scale_rows, 0, start, since, last_position, thread_index, key_rows);

simdgroup_float8x8 query[MY_MATRICES], rotary_query[MY_ROTARY_MATRICES];
for (uint turn = 0; turn < ROW_GROUPS; ++turn) {
  const bool mine = row_group == turn;  // uniform across the simdgroup
  for (uint i = part; mine && i < 8; i += PARTS) {
    const uint r = row_group * 8 + i;
    const ulong at = ulong(first_row) * NUM_HEADS + skipped + r;
    float x[KEY_LANE], y[ROTARY_LANE];
    UNROLL
    for (uint j = 0; j < KEY_LANE; ++j) {
      x[j] = 0.0f;
    }
    UNROLL
    for (uint j = 0; j < ROTARY_LANE; ++j) {
      y[j] = 0.0f;
    }
    if (r < count) {
      load_row<HEAD_DIM, KEY_LANE>(queries + at * HEAD_DIM, lane, x);
      load_row<ROTARY_DIM, ROTARY_LANE>(rotary + at * ROTARY_DIM, lane, y);
    }
#if ROTATE_KEYS
    hadamard<HEAD_DIM, KEY_LANE>(x, lane, as_type<float>(KEY_NORM_BITS));
#endif
#if ROTATE_ROTARY
    hadamard<ROTARY_DIM, ROTARY_LANE>(y, lane, as_type<float>(ROTARY_NORM_BITS));
#endif
    UNROLL
    for (uint j = 0; j < KEY_LANE; ++j) {
      if (lane * KEY_LANE + j < HEAD_DIM) {
        staged[i * QUERY_STRIDE + lane * KEY_LANE + j] = x[j] * params[0];
      }
    }
    UNROLL
    for (uint j = 0; j < ROTARY_LANE; ++j) {
      if (lane * ROTARY_LANE + j < ROTARY_DIM) {
        // the caller has applied the scale
        staged[i * QUERY_STRIDE + HEAD_DIM + lane * ROTARY_LANE + j] = y[j] * LOG2_E;
      }
    }
  }
  // queries are staged, and key_rows of the first keys are known
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (mine) {
    UNROLL
    for (uint k = 0; k < MY_MATRICES; ++k) {
      const uint at = part * MY_MATRICES + k;
      if (at < MATRICES) {
        simdgroup_load(query[k], staged + at * 8, QUERY_STRIDE);
      }
    }
    UNROLL
    for (uint k = 0; k < MY_ROTARY_MATRICES; ++k) {
      const uint at = part * MY_ROTARY_MATRICES + k;
      if (at < ROTARY_MATRICES) {
        simdgroup_load(rotary_query[k], staged + HEAD_DIM + at * 8, QUERY_STRIDE);
      }
    }
  }
  // the next row group or latents overwrite the staged queries
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
simdgroup_float8x8 output[MY_MATRICES];
UNROLL
for (uint n = 0; n < MY_MATRICES; ++n) {
  output[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

const uint my_row = row_group * 8 + row_of(lane);
const int my_position = my_row < count ? positions[first_row + (skipped + my_row) / NUM_HEADS] : -1;
const int my_since = SINCE(first_row + (skipped + min(my_row, count - 1)) / NUM_HEADS, my_position);
// This is uniform across the simdgroup. All simdgroups take part in loads.
const bool has_rows = row_group * 8 < count;
threadgroup const float2* const group_products = part_products + row_group * (PARTS * KEYS / 8 * 32) + lane;
float top = LOWEST, sum = 0.0f;
{
  LatentFilling::Raw latents[LatentFilling::TURNS];
  RotaryFilling::Raw rotary_keys[RotaryFilling::TURNS];
  LatentFilling::start(k_codes, key_scale_rows, key_rows, thread_index, latents);
  RotaryFilling::start(v_codes, value_scale_rows, key_rows, thread_index, rotary_keys);
  LatentFilling::finish(k_codes, key_scale_rows, key_rows, latent_tile, thread_index, latents);
  RotaryFilling::finish(v_codes, value_scale_rows, key_rows, rotary_tile, thread_index, rotary_keys);
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // the first keys are loaded

for (uint now = 0; index < end && start <= last_position; now = KEYS - now) {
  const uint next = KEYS - now;
  const int next_start = span.tile((index + 1) / STEPS) * 32 + (index + 1) % STEPS * KEYS;
  const bool is_last = index + 1 >= end || next_start > last_position;
  simdgroup_float8x8 products[KEYS / 8];
  if (has_rows) {
    UNROLL
    for (uint c = 0; c < KEYS / 8; ++c) {
      products[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    UNROLL
    for (uint k = 0; k < MY_MATRICES; ++k) {
      const uint at = part * MY_MATRICES + k;
      KEEP_ORDER
      UNROLL
      for (uint c = 0; at < MATRICES && c < KEYS / 8; ++c) {
        simdgroup_matrix<Keys::Tile, 8, 8> keys;
        simdgroup_load(
            keys, latent_tile + c * 8 * LatentFilling::STRIDE + at * 8, LatentFilling::STRIDE, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(products[c], query[k], keys, products[c]);
      }
    }
    UNROLL
    for (uint c = 0; c < KEYS / 8; ++c) {
      KEEP_ORDER
      simdgroup_float8x8 turned = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      UNROLL
      for (uint k = 0; k < MY_ROTARY_MATRICES; ++k) {
        const uint at = part * MY_ROTARY_MATRICES + k;
        if (at < ROTARY_MATRICES) {
          simdgroup_matrix<Values::Tile, 8, 8> keys;
          simdgroup_load(
              keys, rotary_tile + c * 8 * RotaryFilling::STRIDE + at * 8, RotaryFilling::STRIDE, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(turned, rotary_query[k], keys, turned);
        }
      }
      KEEP_ORDER
      float2 both;
      UNROLL
      for (uint i = 0; i < 2; ++i) {
        const uint column = now + c * 8 + column_of(lane) + i;
        both[i] = products[c].thread_elements()[i] * key_rows[column].key_scale +
                  turned.thread_elements()[i] * key_rows[column].value_scale;
      }
      part_products[(simd_index * (KEYS / 8) + c) * 32 + lane] = both;
    }
  }
  if (!is_last) {
    find_rows<HEAD_DIM, ROTARY_DIM>(
        table, key_scale_rows, value_scale_rows, 0, next_start, since, last_position, thread_index, key_rows + next);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // part_products and the next key_rows are stored

  LatentFilling::Raw latents[LatentFilling::TURNS];
  RotaryFilling::Raw rotary_keys[RotaryFilling::TURNS];
  if (!is_last) {
    LatentFilling::start(k_codes, key_scale_rows, key_rows + next, thread_index, latents);
    RotaryFilling::start(v_codes, value_scale_rows, key_rows + next, thread_index, rotary_keys);
  }
  if (has_rows) {
    float new_top = top;
    UNROLL
    for (uint c = 0; c < KEYS / 8; ++c) {
      KEEP_ORDER
      float2 product = float2(0.0f);
      UNROLL
      for (uint p = 0; p < PARTS; ++p) {
        product += group_products[(p * (KEYS / 8) + c) * 32];
      }
      UNROLL
      for (uint i = 0; i < 2; ++i) {
        const int key = start + int(c * 8 + column_of(lane) + i);
        float x = LOWEST;
        if (is_visible(key, my_position, my_since)) {
          x = logit(product[i], params);
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
    for (uint n = 0; n < MY_MATRICES; ++n) {
      output[n].thread_elements()[0] *= factor;
      output[n].thread_elements()[1] *= factor;
    }
    UNROLL
    for (uint c = 0; c < KEYS / 8; ++c) {
      KEEP_ORDER
      UNROLL
      for (uint i = 0; i < 2; ++i) {
        const uint column = c * 8 + column_of(lane) + i;
        const bool visible = is_visible(start + int(column), my_position, my_since);
        const float weight = visible ? fast::exp2(products[c].thread_elements()[i] - new_top) : 0.0f;
        sum += weight;  // only this lane's columns; joined after the loop
        products[c].thread_elements()[i] = weight * key_rows[now + column].key_scale;
      }
    }
    UNROLL
    for (uint n = 0; n < MY_MATRICES; ++n) {
      const uint at = part * MY_MATRICES + n;
      KEEP_ORDER
      UNROLL
      for (uint c = 0; at < MATRICES && c < KEYS / 8; ++c) {
        simdgroup_matrix<Keys::Tile, 8, 8> values;
        simdgroup_load(values, latent_tile + c * 8 * LatentFilling::STRIDE + at * 8, LatentFilling::STRIDE);
        simdgroup_multiply_accumulate(output[n], products[c], values, output[n]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // latents and part_products may be overwritten
  if (!is_last) {
    LatentFilling::finish(k_codes, key_scale_rows, key_rows + next, latent_tile, thread_index, latents);
    RotaryFilling::finish(v_codes, value_scale_rows, key_rows + next, rotary_tile, thread_index, rotary_keys);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next keys are stored
  ++index;
  start = next_start;
}

sum += simd_shuffle_xor(sum, 1);
sum += simd_shuffle_xor(sum, 8);
for (uint turn = 0; turn < ROW_GROUPS; ++turn) {
  const bool mine = has_rows && row_group == turn;  // uniform across the simdgroup
  if (mine) {
    UNROLL
    for (uint n = 0; n < MY_MATRICES; ++n) {
      const uint at = part * MY_MATRICES + n;
      if (at < MATRICES) {
        simdgroup_store(output[n], staged + at * 8, OUT_STRIDE);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // outputs are staged
  for (uint i = part; mine && i < 8; i += PARTS) {
    const uint r = row_group * 8 + i;
    const float row_top = simd_shuffle(top, ushort(lane_of(i))), row_sum = simd_shuffle(sum, ushort(lane_of(i)));
    if (r < count) {  // uniform across the simdgroup
      float x[VALUE_LANE];
      load_row<VALUE_DIM, VALUE_LANE>(staged + i * OUT_STRIDE, lane, x);
      const uint at = out_row * NUM_HEADS + skipped + r;
#if SPLIT
      write_part(x, row_top, row_sum, lane, at, partial, stats);
#else
      write_output(x, normalizer(row_top, row_sum, SINK((skipped + r) % NUM_HEADS)), lane, out + ulong(at) * VALUE_DIM);
#endif
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the next row group overwrites the staged outputs
}
