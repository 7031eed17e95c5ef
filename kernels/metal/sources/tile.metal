// Tiles of KEYS keys in threadgroup memory, for the kernels with 8x8 matrices, chunk and latent. In a matrix,
// lane l has two adjacent values of row row_of(l); the first is in column column_of(l). MLX's own kernels
// rely on this order, too.

METAL_FUNC uint row_of(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
METAL_FUNC uint column_of(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
METAL_FUNC uint lane_of(uint row) { return (row & 4) * 4 + row % 4 * 2; }

METAL_FUNC void put_quads(threadgroup half* to, float4 low, float4 high) {
  ((threadgroup half4*)to)[0] = half4(low);
  ((threadgroup half4*)to)[1] = half4(high);
}
METAL_FUNC void put_quads(threadgroup bfloat* to, float4 low, float4 high) {
  ((threadgroup bfloat4*)to)[0] = bfloat4(low);
  ((threadgroup bfloat4*)to)[1] = bfloat4(high);
}
METAL_FUNC void put_quads(threadgroup float* to, float4 low, float4 high) {
  ((threadgroup float4*)to)[0] = low;
  ((threadgroup float4*)to)[1] = high;
}

// A key's row in the pool (UNUSED if no query of the tile sees it), and the scales of its K and V.
struct KeyRow {
  uint row;
  float key_scale;
  float value_scale;
};

// Moves K or V of KEYS keys from pages to a threadgroup tile with padded rows; unused rows become zeros. Each
// thread has every THREADS-th octet. Scales of groups need complete simdgroups. These are given, because KEYS
// times the octets of such a row is a multiple of 32.
template <typename Format, int D, uint MOST_AHEAD = 16>
struct Filling {
  typedef typename Format::Raw Raw;
  typedef typename Format::Tile Element;
  enum : uint {
    OCTETS = D / 8,
    UNITS = KEYS * OCTETS,
    TURNS = (UNITS + THREADS - 1) / THREADS,
    STRIDE = D + 8,
    // whether codes are loaded during the products: only if they need few registers
    AHEAD = TURNS * sizeof(Raw) <= MOST_AHEAD
  };

  // Return the key (or the octet) of a thread's unit `i`. If a row's octets divide the threads, units are a
  // constant number of keys apart.
  static METAL_FUNC uint key_of(uint i, uint thread_index) {
    return THREADS % OCTETS == 0 ? i * (THREADS / OCTETS) + thread_index / OCTETS
                                 : (i * THREADS + thread_index) / OCTETS;
  }
  static METAL_FUNC uint octet_of(uint i, uint thread_index) {
    return THREADS % OCTETS == 0 ? thread_index % OCTETS : (i * THREADS + thread_index) % OCTETS;
  }
  static METAL_FUNC bool has_unit(uint i, uint thread_index) {
    return UNITS % THREADS == 0 || i * THREADS + thread_index < UNITS;
  }

  static METAL_FUNC void load(
      const device typename Format::Code* codes, const device typename Format::Scale* scales,
      threadgroup const KeyRow* rows, uint i, uint thread_index, thread Raw& raw) {
    raw = Raw(0u);
    if (has_unit(i, thread_index)) {
      const uint row = rows[key_of(i, thread_index)].row;
      if (row != UNUSED) {
        raw = load_octet<Format, D>(codes, scales, row, octet_of(i, thread_index));
      }
    }
  }

  // Begins to load codes during the products, if AHEAD.
  static METAL_FUNC void start(
      const device typename Format::Code* codes, const device typename Format::Scale* scales,
      threadgroup const KeyRow* rows, uint thread_index, thread Raw* raws) {
    UNROLL
    for (uint i = 0; AHEAD && i < TURNS; ++i) {
      load(codes, scales, rows, i, thread_index, raws[i]);
    }
  }

  // Fills the tile with the codes that `start` has loaded or, unless AHEAD, loads them now.
  static METAL_FUNC void finish(
      const device typename Format::Code* codes, const device typename Format::Scale* scales,
      threadgroup const KeyRow* rows, threadgroup Element* tile, uint thread_index, thread Raw* raws) {
    UNROLL
    for (uint i = 0; i < TURNS; ++i) {
      const uint key = key_of(i, thread_index), octet = octet_of(i, thread_index);
      KEEP_ORDER
      if (!AHEAD) {
        load(codes, scales, rows, i, thread_index, raws[i]);
      }
      if (has_unit(i, thread_index)) {
        put(raws[i], scales, rows[key].row, octet, thread_index % 32, tile + key * STRIDE + octet * 8);
      }
    }
  }

  // Copies 16-bit values, which a tile stores unchanged.
  static METAL_FUNC void put(
      uint4 raw, const device typename Format::Scale*, uint, uint, uint, threadgroup Element* to) {
    *(threadgroup uint4*)to = raw;
  }

  template <typename Codes>
  static METAL_FUNC void put(
      Codes raw, const device typename Format::Scale* scales, uint row, uint octet, uint lane,
      threadgroup Element* to) {
    float4 low, high;
    Format::unpack(raw, low, high);
    Format::template scale_octet<D>(scales, row, octet, lane, row != UNUSED, low, high);
    put_quads(to, low, high);
  }
};

// Finds the rows of K (DK values each) and V (DV values each) of keys [`start`, `start` + KEYS).
template <int DK, int DV>
METAL_FUNC void find_rows(
    const device int* table, const device Keys::Scale* k_scales, const device Values::Scale* v_scales, uint kv_head,
    int start, int since, int last_position, uint thread_index, threadgroup KeyRow* rows) {
  if (thread_index < KEYS) {
    const int key = start + int(thread_index);
    bool used = key <= last_position;
#if WINDOW
    used = used && (key >= since || key < KEEP);
#endif
    uint row = UNUSED;
    float key_scale = 0.0f, value_scale = 0.0f;
    if (used) {
      const uint page = uint(table[uint(key) / PAGE_SIZE]);
      row = (page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + uint(key) % PAGE_SIZE;
      key_scale = Keys::row_scale<DK>(k_scales, row);
      value_scale = Values::row_scale<DV>(v_scales, row);
    }
    rows[thread_index].row = row;
    rows[thread_index].key_scale = key_scale;
    rows[thread_index].value_scale = value_scale;
  }
}
