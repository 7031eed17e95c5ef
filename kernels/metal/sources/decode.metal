// One query row of a sequence against its keys: a threadgroup reads one KV head's rows once for
// all GROUP query heads that share it.
//   grid: (items, KV heads); an item is (row, sequence, first tile, end tile) of one split
//   a simdgroup takes every NUM_SIMDGROUPS-th tile of 32 keys: products with the lanes across a
//   row (8 codes each), softmax with one lane per key, weighted values with the lanes across a row
// Scales of rows never meet the codes: K's multiply the 32 products, V's the 32 weights. Scales of
// groups in a row multiply the codes, read by one lane of each group.

// Sum over the COUNT lanes of one row, right in its first lane.
template <int COUNT>
METAL_FUNC float sum_row(float x, uint index) {
  constexpr ushort first = COUNT > 16 ? 16 : COUNT > 8 ? 8 : COUNT > 4 ? 4 : COUNT > 2 ? 2 : 1;
  const float other = simd_shuffle_down(x, first);
  x += index + first < COUNT ? other : 0.0f;
  for (ushort step = first / 2; step > 0; step /= 2) {
    x += simd_shuffle_down(x, step);
  }
  return x;
}

#if KEYS_IN_RUNS || VALUES_IN_RUNS
// Rows of COUNT words where COUNT does not divide 32: whole rows at a time would straddle lines. One
// head's rows of a page follow each other, so a tile is loaded as COUNT runs of 32 words, whatever
// row they belong to; the lanes of a row then find theirs in two runs, the current and the next.
template <int COUNT>
struct Runs {
  uint index;
  uint current;
  uint next;

  // A word per lane; zero where its row is not visible. `row` is of the pool, one key per lane.
  static METAL_FUNC uint load(const device uint* codes, uint row, uint run, uint lane, int start, int position) {
    const uint at = 32 * run + lane;
    const uint source = simd_shuffle(row, ushort(at / COUNT));
    return is_visible(start + int(at / COUNT), position) ? codes[ulong(source) * COUNT + at % COUNT] : 0u;
  }

  METAL_FUNC void begin(const device uint* codes, uint row, uint lane, int start, int position) thread {
    index = 0;
    current = load(codes, row, 0, lane, start, position);
    next = load(codes, row, 1, lane, start, position);
  }

  // Word `first` + lane of the tile; `first` grows by less than 32 from call to call.
  METAL_FUNC uint word(const device uint* codes, uint row, uint first, uint lane, int start, int position) thread {
    if (first / 32 > index) {  // the whole simdgroup
      ++index;
      current = next;
      next = index + 1 < COUNT ? load(codes, row, index + 1, lane, start, position) : 0u;
    }
    const ushort from = ushort((first + lane) % 32);
    const uint here = simd_shuffle(current, from), there = simd_shuffle(next, from);
    return (first + lane) / 32 == index ? here : there;
  }
};
#endif
//! body
constexpr uint KEY_OCTETS = HEAD_DIM / 8, VALUE_OCTETS = VALUE_DIM / 8;
constexpr uint KEY_ROWS = 32 / KEY_OCTETS, VALUE_ROWS = 32 / VALUE_OCTETS;  // rows read at once
threadgroup float shared_rows[GROUP * MAX_DIM];  // rotated queries, later the output
threadgroup float scores[NUM_SIMDGROUPS * GROUP * 32];
threadgroup float tops[NUM_SIMDGROUPS * GROUP];
threadgroup float sums[NUM_SIMDGROUPS * GROUP];

const uint lane = thread_index_in_simdgroup, simd_index = simdgroup_index_in_threadgroup;
const uint item = threadgroup_position_in_grid.x, kv_head = threadgroup_position_in_grid.y;
const uint row = items[4 * item], sequence = items[4 * item + 1];
const int end_tile = items[4 * item + 3];
const int position = positions[row];
const uint first_head = kv_head * GROUP;

for (uint g = simd_index; g < GROUP; g += NUM_SIMDGROUPS) {
  float x[KEY_LANE];
  load_row<HEAD_DIM, KEY_LANE>(queries + (ulong(row) * NUM_HEADS + first_head + g) * HEAD_DIM, lane, x);
#if ROTATE_KEYS
  hadamard<HEAD_DIM, KEY_LANE>(x, lane, as_type<float>(KEY_NORM_BITS));
#endif
  for (uint i = 0; i < KEY_LANE; ++i) {
    if (lane * KEY_LANE + i < HEAD_DIM) {
      shared_rows[g * MAX_DIM + lane * KEY_LANE + i] = x[i] * params[0];
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const uint key_octet = lane % KEY_OCTETS, value_octet = lane % VALUE_OCTETS;
#if QUERIES_IN_REGISTERS
float4 query_low[GROUP], query_high[GROUP];
for (uint g = 0; g < GROUP; ++g) {
  for (uint i = 0; i < 4; ++i) {
    query_low[g][i] = shared_rows[g * MAX_DIM + key_octet * 8 + i];
    query_high[g][i] = shared_rows[g * MAX_DIM + key_octet * 8 + 4 + i];
  }
}
#endif
float4 low_out[GROUP], high_out[GROUP];
float top[GROUP], sum[GROUP], factor[GROUP];
for (uint g = 0; g < GROUP; ++g) {
  low_out[g] = float4(0.0f);
  high_out[g] = float4(0.0f);
  top[g] = LOWEST;
  sum[g] = 0.0f;
}
threadgroup float* const weights = scores + simd_index * GROUP * 32;
const Span span = span_from<32>(position);

for (int index = items[4 * item + 2] + int(simd_index); index < end_tile; index += NUM_SIMDGROUPS) {
  const int start = span.tile(index) * 32;
  const int key = start + int(lane);
  const bool visible = is_visible(key, position);
  // One lane looks up each page; every lane gets the row of its key.
  uint page = 0;
  if (lane < PAGES_PER_TILE && start + int(lane) * PAGE_SIZE <= position) {
    page = uint(page_table[sequence * uint(page_table_shape[1]) + uint(start) / PAGE_SIZE + lane]);
  }
  page = simd_shuffle(page, ushort(lane / PAGE_SIZE));
  const uint key_row = (page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + uint(key) % PAGE_SIZE;
  const float key_scale = visible ? Keys::row_scale<HEAD_DIM>(KEY_SCALES, key_row) : 0.0f;
  const float value_scale = visible ? Values::row_scale<VALUE_DIM>(VALUE_SCALES, key_row) : 0.0f;

#if KEYS_IN_RUNS
  Runs<KEY_OCTETS> key_runs;
  key_runs.begin(k_codes, key_row, lane, start, position);
#endif
  for (uint base = 0; base < 32; base += KEY_ROWS) {
    const uint r = base + lane / KEY_OCTETS;
    const bool reads = r < 32 && lane < KEY_ROWS * KEY_OCTETS;
    const uint source = simd_shuffle(key_row, ushort(min(r, 31u)));
    float4 low = float4(0.0f), high = float4(0.0f);
#if KEYS_IN_RUNS
    Keys::unpack(key_runs.word(k_codes, key_row, base * KEY_OCTETS, lane, start, position), low, high);
#else
    if (reads && is_visible(start + int(r), position)) {
      Keys::octet<HEAD_DIM>(k_codes, KEY_SCALES, source, key_octet, low, high);
    }
#endif
    Keys::scale_octet<HEAD_DIM>(
        KEY_SCALES, source, key_octet, lane, reads && is_visible(start + int(r), position), low, high);
    for (uint g = 0; g < GROUP; ++g) {
#if QUERIES_IN_REGISTERS
      const float part = dot(low, query_low[g]) + dot(high, query_high[g]);
#else
      float part = 0.0f;
      for (uint i = 0; i < 4; ++i) {
        part += low[i] * shared_rows[g * MAX_DIM + key_octet * 8 + i];
        part += high[i] * shared_rows[g * MAX_DIM + key_octet * 8 + 4 + i];
      }
#endif
      const float product = sum_row<KEY_OCTETS>(part, key_octet);
      if (reads && key_octet == 0) {
        weights[g * 32 + r] = product;
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  for (uint g = 0; g < GROUP; ++g) {
    const float x = visible ? logit(weights[g * 32 + lane] * key_scale, params, SLOPE(first_head + g), key, position) : LOWEST;
    const float new_top = max(top[g], simd_max(x));
    const float weight = visible ? fast::exp2(x - new_top) : 0.0f;
    factor[g] = fast::exp2(top[g] - new_top);
    top[g] = new_top;
    sum[g] = sum[g] * factor[g] + weight;  // of this lane's keys
    weights[g * 32 + lane] = weight * value_scale;
    low_out[g] *= factor[g];
    high_out[g] *= factor[g];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

#if VALUES_IN_RUNS
  Runs<VALUE_OCTETS> value_runs;
  value_runs.begin(v_codes, key_row, lane, start, position);
#endif
  for (uint base = 0; base < 32; base += VALUE_ROWS) {
    const uint r = base + lane / VALUE_OCTETS;
    const bool reads = r < 32 && lane < VALUE_ROWS * VALUE_OCTETS;
    const uint source = simd_shuffle(key_row, ushort(min(r, 31u)));
    const bool used = reads && is_visible(start + int(r), position);
    float4 low = float4(0.0f), high = float4(0.0f);
#if VALUES_IN_RUNS
    Values::unpack(value_runs.word(v_codes, key_row, base * VALUE_OCTETS, lane, start, position), low, high);
#else
    if (used) {
      Values::octet<VALUE_DIM>(v_codes, VALUE_SCALES, source, value_octet, low, high);
    }
#endif
    Values::scale_octet<VALUE_DIM>(VALUE_SCALES, source, value_octet, lane, used, low, high);
    if (used) {
      for (uint g = 0; g < GROUP; ++g) {
        low_out[g] += weights[g * 32 + r] * low;
        high_out[g] += weights[g * 32 + r] * high;
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);  // the next tile's products overwrite the weights
}

// Join the simdgroups' results, which are relative to their own largest logits.
for (uint g = 0; g < GROUP; ++g) {
  const float total = simd_sum(sum[g]);
  if (lane == 0) {
    tops[simd_index * GROUP + g] = top[g];
    sums[simd_index * GROUP + g] = total;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint g = 0; g < GROUP; ++g) {
  float joint = LOWEST;
  for (uint s = 0; s < NUM_SIMDGROUPS; ++s) {
    joint = max(joint, tops[s * GROUP + g]);
  }
  const float share = fast::exp2(top[g] - joint);
  for (uint i = 0; i < 4; ++i) {
    float low = low_out[g][i] * share, high = high_out[g][i] * share;
    const float low_part = low, high_part = high;
    for (uint other = 1; other < VALUE_ROWS; ++other) {
      low += simd_shuffle_down(low_part, ushort(other * VALUE_OCTETS));
      high += simd_shuffle_down(high_part, ushort(other * VALUE_OCTETS));
    }
    low_out[g][i] = low;
    high_out[g][i] = high;
  }
}
for (uint turn = 0; turn < NUM_SIMDGROUPS; ++turn) {
  if (simd_index == turn && lane < VALUE_OCTETS) {
    for (uint g = 0; g < GROUP; ++g) {
      for (uint i = 0; i < 4; ++i) {
        const uint low_at = g * MAX_DIM + lane * 8 + i, high_at = low_at + 4;
        shared_rows[low_at] = (turn == 0 ? 0.0f : shared_rows[low_at]) + low_out[g][i];
        shared_rows[high_at] = (turn == 0 ? 0.0f : shared_rows[high_at]) + high_out[g][i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
for (uint g = simd_index; g < GROUP; g += NUM_SIMDGROUPS) {
  float joint = LOWEST, total = 0.0f;
  for (uint s = 0; s < NUM_SIMDGROUPS; ++s) {
    joint = max(joint, tops[s * GROUP + g]);
  }
  for (uint s = 0; s < NUM_SIMDGROUPS; ++s) {
    total += sums[s * GROUP + g] * fast::exp2(tops[s * GROUP + g] - joint);
  }
  float x[VALUE_LANE];
  load_row<VALUE_DIM, VALUE_LANE>(shared_rows + g * MAX_DIM, lane, x);
  const ulong at = ulong(item) * NUM_HEADS + first_head + g;
#if SPLIT
  for (uint i = 0; i < VALUE_LANE; ++i) {
    if (lane * VALUE_LANE + i < VALUE_DIM) {
      partial[at * VALUE_DIM + lane * VALUE_LANE + i] = x[i];
    }
  }
  if (lane == 0) {
    stats[4 * at] = joint;
    stats[4 * at + 1] = total;
    stats[4 * at + 2] = 0.0f;  // four each, so that no launch has fewer than 8
    stats[4 * at + 3] = 0.0f;
  }
#else
  write_output(x, normalizer(joint, total, SINK(first_head + g)), lane, out + at * VALUE_DIM);
#endif
}
