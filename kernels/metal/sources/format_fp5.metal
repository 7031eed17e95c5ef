// fp5 pages: E2M2 codes whose upper four bits are stored like fp4 codes. The fifth, lowest bits are in one
// more byte per octet. In the first octet, this byte is the row's E5M3 scale instead, so its codes have no
// fifth bit. As in fp4, codes are handled as their value times 2^-14.

struct Fp5 {
  typedef uint Code;
  typedef uint8_t Scale;
  typedef half Tile;
  typedef uint2 Raw;  // upper four bits of eight codes, then their lowest bits

  // Number of array elements per row.
  template <int D>
  static METAL_FUNC constexpr uint codes_per_row() { return D / 8; }
  template <int D>
  static METAL_FUNC constexpr uint scales_per_row() { return D / 8; }

  // Converts two codes like Fp4::pair; their lowest bits are at bits 0 and 16 of `low_bits`.
  static METAL_FUNC half2 pair(uint word, uint low_bits) {
    return as_type<half2>(
        (word & 0x00070007u) << 9 | (word & 0x00080008u) << 12 | (low_bits & 0x00010001u) << 8);
  }

  // Loads an octet (eight codes): upper bits at `codes`, lowest bits at `planes`. `octet`: its number in the
  // row.
  static METAL_FUNC Raw load(const device Code* codes, const device Scale* planes, uint octet) {
    return uint2(*codes, octet > 0 ? uint(*planes) : 0u);
  }

  static METAL_FUNC void unpack(Raw raw, thread float4& low, thread float4& high) {
    const uint word = raw.x, bits = raw.y | raw.y << 12;
    const half2 a = pair(word, bits), b = pair(word >> 4, bits >> 1);
    const half2 c = pair(word >> 8, bits >> 2), d = pair(word >> 12, bits >> 3);
    low = float4(half4(a.x, b.x, c.x, d.x));
    high = float4(half4(a.y, b.y, c.y, d.y));
  }

  static METAL_FUNC float scale_value(uint code) { return float(as_type<half>(ushort(code << 7))); }

  template <int D>
  static METAL_FUNC float row_scale(const device Scale* planes, uint row) {
    return scale_value(planes[row * (D / 8)]) * 16384.0f;
  }

  template <int D>
  static METAL_FUNC void scale_octet(
      const device Scale*, uint, uint, uint, bool, thread float4&, thread float4&) {}

  static METAL_FUNC float magnitude(uint index) { return float(as_type<half>(ushort(index << 8))) * 16384.0f; }

  // Returns the index of the magnitude nearest to x / scale, ties to the even one. Comparisons are with exact
  // products.
  static METAL_FUNC uint nearest(float x, float scale) {
    return uint(x > 0.125f * scale) + uint(x >= 0.375f * scale) + uint(x > 0.625f * scale) +
           uint(x >= 0.875f * scale) + uint(x > 1.125f * scale) + uint(x >= 1.375f * scale) +
           uint(x > 1.625f * scale) + uint(x >= 1.875f * scale) + uint(x > 2.25f * scale) +
           uint(x >= 2.75f * scale) + uint(x > 3.25f * scale) + uint(x >= 3.75f * scale) +
           uint(x > 4.5f * scale) + uint(x >= 5.5f * scale) + uint(x > 6.5f * scale);
  }

  // Returns the byte of the best scale, 0 if there is none, and writes the index of each of this lane's
  // values.
  template <int E>
  static METAL_FUNC uint best_scale(thread const float* x, uint lane, thread uint* best_indices) {
    const half base = half(min(group_top<32 * E, E>(x) * as_type<float>(0x3E124925u), 61440.0f));  // 1 / 7
    const uint first = max(uint(as_type<ushort>(base)) >> 7, 1u);
    uint best = 0;
    float best_error = 0.0f;
    for (int i = 0; i < E; ++i) {
      best_indices[i] = 0u;
    }
    for (uint candidate = 0; candidate < 5; ++candidate) {
      const uint code = min(first + (candidate < 4 ? candidate : 6), 247u);
      const float scale = scale_value(code);
      uint indices[E];
      float errors[E];
      for (int i = 0; i < E; ++i) {
        const float size = fabs(x[i]);
        indices[i] = lane * E + i < 8 ? Fp4::nearest(size, scale) << 1 : nearest(size, scale);
        const float difference = size - scale * magnitude(indices[i]);
        // keeps the compiler from fusing this product into the sum
        errors[i] = fma(difference, difference, 0.0f);
      }
      const float error = Fp4::tree_sum<E>(errors);
      if (base > half(0.0f) && (best == 0 || error < best_error)) {
        best = code;
        best_error = error;
        for (int i = 0; i < E; ++i) {
          best_indices[i] = indices[i];
        }
      }
    }
    return best;
  }

  template <int D, int E>
  static METAL_FUNC bool store(thread float* x, uint lane, ulong row, device Code* codes, device Scale* planes) {
    const bool finite = keep_finite<E>(x);
    uint indices[E], chosen[E];
    const uint scale = best_scale<E>(x, lane, indices);
    for (int i = 0; i < E; ++i) {
      chosen[i] = scale > 0 ? indices[i] >> 1 | as_type<uint>(x[i]) >> 31 << 3 : 0u;
    }
    store_codes<4, D, E>(chosen, lane, row, codes);
    constexpr int here = E < 8 ? E : 8;  // values of one octet that this lane has
    for (int w = 0; w < E / here; ++w) {
      uint plane = 0;
      for (int i = 0; i < here; ++i) {
        plane |= (indices[w * here + i] & 1u) << ((lane * E + i) % 8);
      }
      for (ushort step = 1; step < 8 / here; step *= 2) {
        plane |= simd_shuffle_xor(plane, step);
      }
      if (lane * E % 8 == 0 && lane * E + w * here < D) {
        planes[row * (D / 8) + lane * E / 8 + w] = Scale(lane + w == 0 ? scale : plane);
      }
    }
    return finite;
  }
};
