// Decoding: one query row of a sequence attends to its keys. A threadgroup reads the rows of one KV head for
// all GROUP query heads that share it.
//   grid: (items, KV heads); an item is (row, sequence, first tile, end tile) of one split of the keys
//   simdgroup (slice, range) has HEADS query heads (its slice) and every RANGES-th tile of 32 keys
// LANES lanes read one row, 8 codes each. So one load takes 32 / LANES rows, a tile needs LANES loads, and a
// stage of these loads is in flight at once. A lane then has products of 8 dims with each of its rows.
// Products are summed across lanes by halving: in each step, a lane keeps half of its products and adds
// another lane's. In the end lane l has the complete product of key `key_of(l)` and computes the softmax
// weight of this key. For weighted sums, lanes again read rows.
// Scales of whole rows never multiply codes: K's scales multiply the products, V's scales the weights. Scales
// of groups of dims do multiply the codes; one lane of each group reads the scale.

// Distribution of rows of D values (OCTETS times 8) over lanes; LANES is OCTETS rounded up to a power of two.
template <int D>
struct Across {
  enum : uint {
    OCTETS = D / 8,
    LANES = OCTETS > 16 ? 32 : OCTETS > 8 ? 16 : OCTETS > 4 ? 8 : OCTETS > 2 ? 4 : OCTETS,
    ROWS = 32 / LANES
  };

  // key_of: the key in the tile whose product a lane gets. place_of: the position of a key's weight in
  // memory, so that a lane reads weights of successive loads from consecutive positions.
  static METAL_FUNC uint key_of(uint lane) { return lane % LANES * ROWS + lane / LANES; }
  static METAL_FUNC uint place_of(uint key) { return key % ROWS * LANES + key / ROWS; }
};

// A tile of 32 keys of one KV head; row numbers count rows of the pool.
struct Tile {
  uint key_row;    // row of the tile's key number `lane`
  uint first_row;  // row of its first key, if one page holds the tile
  int start;
  int position;
  int since;  // first visible position after the kept ones
  int first_seen;  // a visible key of the tile

  METAL_FUNC uint row(uint key) const thread {
#if PAGES_PER_TILE == 1
    return first_row + key;
#else
    return simd_shuffle(key_row, ushort(key));
#endif
  }

  METAL_FUNC bool sees(uint key) const thread { return is_visible(start + int(key), position, since); }

  // Returns `key` if it is visible, else another key that is.
  METAL_FUNC uint seen(uint key) const thread {
#if WINDOW
    return sees(key) ? key : uint(first_seen);
#else
    return min(key, uint(position - start));
#endif
  }
};

// Returns the page that this lane looks up for the tile at `start`: the same page for all lanes if one page
// holds the tile.
METAL_FUNC uint page_at(const device int* table, int start, int position, uint lane) {
#if PAGES_PER_TILE == 1
  return uint(table[uint(start) / PAGE_SIZE]);
#else
  const bool used = lane < PAGES_PER_TILE && start + int(lane) * PAGE_SIZE <= position;
  return used ? uint(table[uint(start) / PAGE_SIZE + lane]) : 0u;
#endif
}

METAL_FUNC Tile tile_of(uint page, uint kv_head, int start, int position, int since, uint lane) {
  Tile tile;
  tile.start = start;
  tile.position = position;
  tile.since = since;
  tile.first_seen = 0;
#if WINDOW
  if (start >= KEEP && start < since) {
    tile.first_seen = since - start;
  }
#endif
#if PAGES_PER_TILE == 1
  tile.first_row = (page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + uint(start) % PAGE_SIZE;
  tile.key_row = 0u;
#else
  page = simd_shuffle(page, ushort(lane / PAGE_SIZE));
  tile.first_row = 0u;
  tile.key_row = (page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + (uint(start) + lane) % PAGE_SIZE;
#endif
  return tile;
}

METAL_FUNC void set_word(thread uint& raw, uint word) { raw = word; }
METAL_FUNC void set_word(thread uint2& raw, uint word) { raw = uint2(word, 0u); }
METAL_FUNC void set_word(thread uint4& raw, uint word) { raw = uint4(word); }
METAL_FUNC uint get_word(uint raw) { return raw; }
METAL_FUNC uint get_word(uint2 raw) { return raw.x; }
METAL_FUNC uint get_word(uint4 raw) { return raw.x; }

// K or V of a tile. Loads of whole rows would straddle cache lines if a row is not a multiple of a line. With
// RUNS, a tile is therefore loaded as runs of 32 adjacent words (a head's rows of a page are contiguous), and
// the lanes of a row find its words in two of these runs.
template <typename Format, int D, bool RUNS, int STAGE>
struct Part {
  typedef typename Format::Raw Raw;
  typedef Across<D> Lanes;
  typedef const device typename Format::Code* CodePointer;
  typedef const device typename Format::Scale* ScalePointer;
  enum : uint {
    COUNT = RUNS ? Lanes::OCTETS : STAGE,  // number of loads in flight
    CODE_ROW = Format::template codes_per_row<D>(),
    SCALE_ROW = Format::template scales_per_row<D>(),
    CODE_OCTET = CODE_ROW / Lanes::OCTETS,
    SCALE_OCTET = SCALE_ROW / Lanes::OCTETS
  };

  // Issues a tile's loads, beginning with number `from`, all at once. An invisible row is replaced by a
  // visible one, so that no branch separates the loads; the invisible key's weight is zero.
  static METAL_FUNC void load(
      CodePointer codes, ScalePointer scales, Tile tile, uint from, uint lane, thread Raw* raws) {
    const uint octet = min(lane % Lanes::LANES, Lanes::OCTETS - 1);
    const uint key = from * Lanes::ROWS + lane / Lanes::LANES;
#if PAGES_PER_TILE == 1
    codes += ulong(tile.first_row) * CODE_ROW;
    scales += ulong(tile.first_row) * SCALE_ROW;
#endif
    UNROLL
    for (uint i = 0; i < COUNT; ++i) {
      const uint at = 32 * i + lane;
      const uint seen = tile.seen(RUNS ? at / Lanes::OCTETS : key + i * Lanes::ROWS);
#if PAGES_PER_TILE == 1
      const uint code = seen * CODE_ROW, scale = seen * SCALE_ROW;
#else
      const uint row = simd_shuffle(tile.key_row, ushort(seen));
      const ulong code = ulong(row) * CODE_ROW, scale = ulong(row) * SCALE_ROW;
#endif
      load_one(
          codes + (code + (RUNS ? at % Lanes::OCTETS : octet * CODE_OCTET)), scales + (scale + octet * SCALE_OCTET),
          octet, raws[i]);
    }
  }

  static METAL_FUNC void load_one(CodePointer code, ScalePointer scale, uint octet, thread Raw& raw) {
    if (RUNS) {
      set_word(raw, *(const device uint*)code);
    } else {
      raw = Format::load(code, scale, octet);
    }
  }

  // Returns this lane's 8 values of load `index`; `raws` begins at load `from`.
  static METAL_FUNC void values(
      ScalePointer scales, Tile tile, uint index, uint from, uint lane, thread const Raw* raws, thread float4& low,
      thread float4& high) {
    const uint octet = lane % Lanes::LANES, key = index * Lanes::ROWS + lane / Lanes::LANES;
    if (RUNS) {
      const uint run = index * Lanes::ROWS * Lanes::OCTETS / 32;  // uniform across the simdgroup
      const uint at = key * Lanes::OCTETS + octet;
      const uint here = simd_shuffle(get_word(raws[run]), ushort(at % 32));
      const uint there = simd_shuffle(get_word(raws[min(run + 1, COUNT - 1)]), ushort(at % 32));
      Raw raw;
      set_word(raw, at / 32 == run ? here : there);
      Format::unpack(raw, low, high);
    } else {
      Format::unpack(raws[index - from], low, high);
    }
    const bool reads = octet < Lanes::OCTETS && tile.sees(key);
    Format::template scale_octet<D>(scales, tile.row(key), octet, lane, reads, low, high);
  }
};

typedef Part<Keys, HEAD_DIM, KEYS_IN_RUNS, KEY_STAGE> KeyPart;
typedef Part<Values, VALUE_DIM, VALUES_IN_RUNS, VALUE_STAGE> ValuePart;

// Sums the products of loads [base, base + N) across lanes, by halving. For each head, lane l gets the
// product of load base + l % N, summed over N lanes.
template <int N>
struct Products {
  static METAL_FUNC void sum(
      const device Keys::Code* codes, const device Keys::Scale* scales, Tile tile, thread const float4* queries,
      uint base, uint lane, thread KeyPart::Raw* raws, thread float* products) {
    if (KEYS_IN_RUNS ? N == KeyPart::Lanes::LANES : N == KEY_STAGE) {
      KeyPart::load(codes, scales, tile, base, lane, raws);
    }
    float first[HEADS], second[HEADS];
    Products<N / 2>::sum(codes, scales, tile, queries, base, lane, raws, first);
    Products<N / 2>::sum(codes, scales, tile, queries, base + N / 2, lane, raws, second);
    const bool is_second = (lane & (N / 2)) != 0;
    UNROLL
    for (uint g = 0; g < HEADS; ++g) {
      const float sent = is_second ? first[g] : second[g];
      products[g] = (is_second ? second[g] : first[g]) + simd_shuffle_xor(sent, ushort(N / 2));
    }
    KEEP_ORDER
  }
};

template <>
struct Products<1> {
  static METAL_FUNC void sum(
      const device Keys::Code* codes, const device Keys::Scale* scales, Tile tile, thread const float4* queries,
      uint base, uint lane, thread KeyPart::Raw* raws, thread float* products) {
    if (KEYS_IN_RUNS ? KeyPart::Lanes::LANES == 1 : KEY_STAGE == 1) {
      KeyPart::load(codes, scales, tile, base, lane, raws);
    }
    float4 low, high;
    KeyPart::values(scales, tile, base, KEYS_IN_RUNS ? 0 : base / KEY_STAGE * KEY_STAGE, lane, raws, low, high);
    UNROLL
    for (uint g = 0; g < HEADS; ++g) {
      products[g] = dot(low, queries[2 * g]) + dot(high, queries[2 * g + 1]);
    }
  }
};
//! body
typedef KeyPart::Lanes KeyLanes;
typedef ValuePart::Lanes ValueLanes;
constexpr uint QUERY_QUADS = HEAD_DIM / 4, OUT_QUADS = VALUE_DIM / 4;
threadgroup float4 shared_rows[SHARED_QUADS];  // rotated queries; later outputs of half the ranges
threadgroup float4 scores[NUM_SIMDGROUPS * HEADS * 8];
threadgroup float tops[NUM_SIMDGROUPS * HEADS];
threadgroup float sums[NUM_SIMDGROUPS * HEADS];

if (threadgroup_position_in_grid.x == 0 && threadgroup_position_in_grid.y == 0 && thread_index_in_threadgroup < 8) {
  read[thread_index_in_threadgroup] = true;
}
const uint lane = thread_index_in_simdgroup, simd_index = simdgroup_index_in_threadgroup;
const uint slice = simd_index / RANGES, range = simd_index % RANGES;
const uint item = threadgroup_position_in_grid.x, kv_head = threadgroup_position_in_grid.y;
const uint row = items[4 * item], sequence = items[4 * item + 1];
const int end_tile = items[4 * item + 3];
const int position = positions[row], since = SINCE(row, position);
const uint first_head = kv_head * GROUP;
const device Keys::Scale* const key_scale_rows = KEY_SCALES;
const device Values::Scale* const value_scale_rows = VALUE_SCALES;
const device int* const table = page_table + sequence * uint(page_table_shape[1]);
const Span span = span_from<32>(since);

threadgroup float* const query_rows = (threadgroup float*)shared_rows;
for (uint g = simd_index; g < GROUP; g += NUM_SIMDGROUPS) {
  float x[KEY_LANE];
  load_row<HEAD_DIM, KEY_LANE>(queries + (row * NUM_HEADS + first_head + g) * HEAD_DIM, lane, x);
#if ROTATE_KEYS
  hadamard<HEAD_DIM, KEY_LANE>(x, lane, as_type<float>(KEY_NORM_BITS));
#endif
  UNROLL
  for (uint i = 0; i < KEY_LANE; ++i) {
    if (lane * KEY_LANE + i < HEAD_DIM) {
      query_rows[g * HEAD_DIM + lane * KEY_LANE + i] = x[i] * params[0];
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // the queries are stored

// The last slice may have fewer heads. It then computes the last head again and does not write it.
const uint key_octet = min(lane % KeyLanes::LANES, KeyLanes::OCTETS - 1);
const bool has_octet = lane % KeyLanes::LANES < KeyLanes::OCTETS;
float4 query[2 * HEADS], outs[2 * HEADS];
float top[HEADS], sum[HEADS];
UNROLL
for (uint g = 0; g < HEADS; ++g) {
  const uint at = min(slice * HEADS + g, uint(GROUP) - 1) * QUERY_QUADS + key_octet * 2;
  query[2 * g] = has_octet ? shared_rows[at] : float4(0.0f);
  query[2 * g + 1] = has_octet ? shared_rows[at + 1] : float4(0.0f);
  outs[2 * g] = float4(0.0f);
  outs[2 * g + 1] = float4(0.0f);
  top[g] = LOWEST;
  sum[g] = 0.0f;
}
threadgroup float* const weights = (threadgroup float*)scores + simd_index * HEADS * 32;
const uint key_in_tile = KeyLanes::key_of(lane);

int index = items[4 * item + 2] + int(range);
uint page = index < end_tile ? page_at(table, span.tile(index) * 32, position, lane) : 0u;
for (; index < end_tile; index += RANGES) {
  const Tile tile = tile_of(page, kv_head, span.tile(index) * 32, position, since, lane);
  if (index + RANGES < end_tile) {  // uniform across the simdgroup; looks up the next tile's page early
    page = page_at(table, span.tile(index + RANGES) * 32, position, lane);
  }
  const int key = tile.start + int(key_in_tile);
  const bool visible = tile.sees(key_in_tile);
  const uint scale_row = tile.row(key_in_tile);
  const float key_scale = visible ? Keys::row_scale<HEAD_DIM>(key_scale_rows, scale_row) : 0.0f;
  const float value_scale = visible ? Values::row_scale<VALUE_DIM>(value_scale_rows, scale_row) : 0.0f;

  float products[HEADS];
  {
    KeyPart::Raw raws[KeyPart::COUNT];
    Products<KeyLanes::LANES>::sum(k_codes, key_scale_rows, tile, query, 0, lane, raws, products);
  }
  ValuePart::Raw raws[ValuePart::COUNT];
  ValuePart::load(v_codes, value_scale_rows, tile, 0, lane, raws);  // loaded during softmax

  UNROLL
  for (uint g = 0; g < HEADS; ++g) {
    const float x = visible ? logit(products[g] * key_scale, params) : LOWEST;
    const float new_top = max(top[g], simd_max(x));
    const float weight = visible ? fast::exp2(x - new_top) : 0.0f;
    const float factor = fast::exp2(top[g] - new_top);
    top[g] = new_top;
    sum[g] = sum[g] * factor + weight;  // only this lane's keys; joined after the loop
    weights[g * 32 + ValueLanes::place_of(key_in_tile)] = weight * value_scale;
    outs[2 * g] *= factor;
    outs[2 * g + 1] *= factor;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);  // the weights are stored

  const uint place = lane / ValueLanes::LANES * ValueLanes::LANES;
  UNROLL
  for (uint base = 0; base < ValueLanes::LANES; base += WEIGHTS) {
    KEEP_ORDER
    float shares[HEADS * WEIGHTS];
    UNROLL
    for (uint g = 0; g < HEADS; ++g) {
#if WEIGHTS == 4
      const float4 four = scores[(simd_index * HEADS + g) * 8 + (place + base) / 4];
      UNROLL
      for (uint i = 0; i < 4; ++i) {
        shares[g * 4 + i] = four[i];
      }
#else
      UNROLL
      for (uint i = 0; i < WEIGHTS; ++i) {
        shares[g * WEIGHTS + i] = weights[g * 32 + place + base + i];
      }
#endif
    }
    UNROLL
    for (uint i = 0; i < WEIGHTS; ++i) {
      if (!VALUES_IN_RUNS && base + i > 0 && (base + i) % VALUE_STAGE == 0) {
        ValuePart::load(v_codes, value_scale_rows, tile, base + i, lane, raws);
      }
      float4 low, high;
      ValuePart::values(
          value_scale_rows, tile, base + i, VALUES_IN_RUNS ? 0 : (base + i) / VALUE_STAGE * VALUE_STAGE, lane, raws, low, high);
      UNROLL
      for (uint g = 0; g < HEADS; ++g) {
        outs[2 * g] += shares[g * WEIGHTS + i] * low;
        outs[2 * g + 1] += shares[g * WEIGHTS + i] * high;
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);  // the next tile's weights overwrite these
}

// Join the ranges. Each range's results are relative to its own largest logit.
UNROLL
for (uint g = 0; g < HEADS; ++g) {
  const float total = simd_sum(sum[g]);
  if (lane == 0) {
    tops[simd_index * HEADS + g] = top[g];
    sums[simd_index * HEADS + g] = total;
  }
}
// tops and sums are stored, and the queries may be overwritten
threadgroup_barrier(mem_flags::mem_threadgroup);
UNROLL
for (uint g = 0; g < HEADS; ++g) {
  float joint = LOWEST;
  for (uint s = 0; s < RANGES; ++s) {
    joint = max(joint, tops[(slice * RANGES + s) * HEADS + g]);
  }
  const float share = fast::exp2(top[g] - joint);
  outs[2 * g] *= share;
  outs[2 * g + 1] *= share;
  UNROLL
  for (ushort step = ValueLanes::LANES; step < 32; step *= 2) {
    UNROLL
    for (uint i = 0; i < 4; ++i) {
      outs[2 * g][i] += simd_shuffle_xor(outs[2 * g][i], step);
      outs[2 * g + 1][i] += simd_shuffle_xor(outs[2 * g + 1][i], step);
    }
  }
}
// The upper half of the ranges stores its sums in memory, and the lower half adds its own to them.
const bool is_upper = range >= RANGES / 2;
threadgroup float4* const out_rows =
    shared_rows + (slice * (RANGES / 2) + range % (RANGES / 2)) * HEADS * OUT_QUADS + lane * 2;
if (is_upper && lane < ValueLanes::OCTETS) {
  UNROLL
  for (uint g = 0; g < HEADS; ++g) {
    out_rows[g * OUT_QUADS] = outs[2 * g];
    out_rows[g * OUT_QUADS + 1] = outs[2 * g + 1];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // the upper half is stored
if (!is_upper && lane < ValueLanes::OCTETS) {
  UNROLL
  for (uint g = 0; g < HEADS; ++g) {
    out_rows[g * OUT_QUADS] += outs[2 * g];
    out_rows[g * OUT_QUADS + 1] += outs[2 * g + 1];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);  // all sums are stored
for (uint head = simd_index; head < GROUP; head += NUM_SIMDGROUPS) {
  const uint g = head % HEADS, first = head / HEADS * RANGES;
  float joint = LOWEST, total = 0.0f;
  for (uint s = 0; s < RANGES; ++s) {
    joint = max(joint, tops[(first + s) * HEADS + g]);
  }
  for (uint s = 0; s < RANGES; ++s) {
    total += sums[(first + s) * HEADS + g] * fast::exp2(tops[(first + s) * HEADS + g] - joint);
  }
  float x[VALUE_LANE];
  UNROLL
  for (uint i = 0; i < VALUE_LANE; ++i) {
    x[i] = 0.0f;
  }
  for (uint s = 0; s < RANGES / 2; ++s) {
    float part[VALUE_LANE];
    load_row<VALUE_DIM, VALUE_LANE>(
        (threadgroup float*)shared_rows + ((first / 2 + s) * HEADS + g) * VALUE_DIM, lane, part);
    UNROLL
    for (uint i = 0; i < VALUE_LANE; ++i) {
      x[i] += part[i];
    }
  }
  const uint at = item * NUM_HEADS + first_head + head;
#if SPLIT
  write_part(x, joint, total, lane, at, partial, stats);
#else
  write_output(x, normalizer(joint, total, SINK(first_head + head)), lane, out + at * VALUE_DIM);
#endif
}
