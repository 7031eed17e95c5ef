// States of recurrent layers, float32 [slots, HEADS, HEIGHT, WIDTH], for recurrences whose state is a matrix
// per head. A threadgroup has one segment, one head and a tile of rows. It processes the segment's tokens in
// order, so results depend only on the sequence.
//   segments [B, 8]: first row, number of rows (at least one), slot to read (-1: none), slot to write,
//     first and end of its checkpoints, -, -
//   checkpoints [>= C, 2], ordered by row within each segment: a row, and the slot that gets the state after it
// The kernel writes to an input: the pool is passed twice, for reading and as `to_pool` for writing. A
// segment reads its slot before it writes any slot, and no other segment reads or writes these slots.
//
// LANES lanes share a row of the state. Each lane has VALUES values in runs of VECTOR, so that adjacent lanes
// load adjacent runs. A lane has ROWS rows that are GROUPS = 32 / LANES apart. Multiply-adds are explicit
// fma, because a compiler that splits a loop must not round its parts differently.

#define UNROLL _Pragma("clang loop unroll(full)")

struct Place {
  uint head;
  uint across;  // number of this lane within its row
  uint row;     // this lane's first row

  METAL_FUNC uint row_at(uint j) const thread { return row + j * GROUPS; }
  // Lanes past the last row compute that row again, and store nothing.
  METAL_FUNC uint read_row(uint j) const thread { return min(row_at(j), uint(HEIGHT) - 1); }
  METAL_FUNC ulong state_at(int slot, uint j) const thread {
    return ((ulong(uint(slot)) * HEADS + head) * HEIGHT + read_row(j)) * WIDTH;
  }
};

METAL_FUNC Place place_of(uint tile, uint head, uint simd_index, uint lane) {
  Place place;
  place.head = head;
  place.across = lane % LANES;
  place.row = (tile * NUM_SIMDGROUPS + simd_index) * (ROWS * GROUPS) + lane / LANES;
  return place;
}

// Loads this lane's values of a row with WIDTH values.
template <typename T>
METAL_FUNC void load_values(const device T* row, uint across, thread float* x) {
  UNROLL
  for (uint i = 0; i < VALUES; i += VECTOR) {
    const device T* const from = row + i * LANES + across * VECTOR;
#if VECTOR == 4
    const float4 four = float4(*(const device vec<T, 4>*)from);
    x[i] = four.x;
    x[i + 1] = four.y;
    x[i + 2] = four.z;
    x[i + 3] = four.w;
#else
    UNROLL
    for (uint j = 0; j < VECTOR; ++j) {
      x[i + j] = float(from[j]);
    }
#endif
  }
}

METAL_FUNC void load_state(const device float* pool, int slot, Place place, thread float* state) {
  UNROLL
  for (uint j = 0; j < ROWS; ++j) {
    if (slot >= 0) {  // uniform across the threadgroup
      load_values(pool + place.state_at(slot, j), place.across, state + j * VALUES);
    } else {
      UNROLL
      for (uint i = 0; i < VALUES; ++i) {
        state[j * VALUES + i] = 0.0f;
      }
    }
  }
}

METAL_FUNC void store_state(const device float* pool, int slot, Place place, thread const float* state) {
  UNROLL
  for (uint j = 0; j < ROWS; ++j) {
    if (place.row_at(j) < HEIGHT) {
      device float* const row = (device float*)pool + place.state_at(slot, j);
      UNROLL
      for (uint i = 0; i < VALUES; i += VECTOR) {
        device float* const to = row + i * LANES + place.across * VECTOR;
        thread const float* const x = state + j * VALUES + i;
#if VECTOR == 4
        *(device float4*)to = float4(x[0], x[1], x[2], x[3]);
#else
        UNROLL
        for (uint n = 0; n < VECTOR; ++n) {
          to[n] = x[n];
        }
#endif
      }
    }
  }
}

// Returns the sum over the lanes of a row, in each of them.
METAL_FUNC float row_sum(float x) {
  UNROLL
  for (ushort step = 1; step < LANES; step *= 2) {
    x += simd_shuffle_xor(x, step);
  }
  return x;
}

template <typename T>
METAL_FUNC void store_one(device T* to, float x) {
  *to = T(x);
}

METAL_FUNC float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// Returns log(1 + exp(x)), precise also where it is small: log(1 + e) = 2 atanh(e / (2 + e)).
METAL_FUNC float softplus(float x) {
  const float e = exp(-abs(x)), s = e / (2.0f + e), z = s * s;
  float series = 1.0f / 15.0f;
  series = fma(series, z, 1.0f / 13.0f);
  series = fma(series, z, 1.0f / 11.0f);
  series = fma(series, z, 1.0f / 9.0f);
  series = fma(series, z, 1.0f / 7.0f);
  series = fma(series, z, 1.0f / 5.0f);
  series = fma(series, z, 1.0f / 3.0f);
  series = fma(series, z, 1.0f);
  return fma(2.0f * s, series, x > 0.0f ? x : 0.0f);
}
