// fp4 pages: E2M1 codes, 8 in a uint32 (element 0 in the low nibble), one fp16 scale per row.
// A code's bits, read as part of a half, mean its value times 2^-14. So codes become halves by shifts, and
// the row's scale is multiplied by 2^14.

// Factors by which absmax is multiplied to get candidate scales, as float32 bits in the order of trial.
constant uint FP4_FACTORS[5] = {0x3E2AAAABu, 0x3E206D3Au, 0x3E162FC9u, 0x3E3851ECu, 0x3E681B4Fu};

struct Fp4 {
  typedef uint Code;
  typedef half Scale;
  typedef half Tile;
  typedef uint Raw;

  // Number of array elements per row.
  template <int D>
  static METAL_FUNC constexpr uint codes_per_row() { return D / 8; }
  template <int D>
  static METAL_FUNC constexpr uint scales_per_row() { return 1; }

  // Converts two codes, at bits 0 and 16 of `word`: sign to bit 15, exponent and mantissa to bits 11 to 9 of
  // a half.
  static METAL_FUNC half2 pair(uint word) {
    return as_type<half2>((word & 0x00070007u) << 9 | (word & 0x00080008u) << 12);
  }

  // Converts the 8 codes of a word.
  static METAL_FUNC void unpack(uint word, thread float4& low, thread float4& high) {
    const half2 a = pair(word), b = pair(word >> 4), c = pair(word >> 8), d = pair(word >> 12);
    low = float4(half4(a.x, b.x, c.x, d.x));
    high = float4(half4(a.y, b.y, c.y, d.y));
  }

  // Loads the octet (eight codes) at `codes`.
  static METAL_FUNC Raw load(const device Code* codes, const device Scale*, uint) { return *codes; }

  template <int D>
  static METAL_FUNC float row_scale(const device Scale* scales, uint row) { return float(scales[row]) * 16384.0f; }

  template <int D>
  static METAL_FUNC void scale_octet(
      const device Scale*, uint, uint, uint, bool, thread float4&, thread float4&) {}

  static METAL_FUNC float magnitude(uint index) {
    return float(as_type<half>(ushort(index << 9))) * 16384.0f;
  }

  // Returns the index of the magnitude nearest to x / scale, ties to the even one. Comparisons are with exact
  // products.
  static METAL_FUNC uint nearest(float x, float scale) {
    return uint(x > 0.25f * scale) + uint(x >= 0.75f * scale) + uint(x > 1.25f * scale) + uint(x >= 1.75f * scale) +
           uint(x > 2.5f * scale) + uint(x >= 3.5f * scale) + uint(x > 5.0f * scale);
  }

  // Sums a row in the order that the format defines: repeatedly adds the upper half of the values to the
  // lower half.
  template <int E>
  static METAL_FUNC float tree_sum(thread float* errors) {
    for (ushort step = 16; step > 0; step /= 2) {
      for (int i = 0; i < E; ++i) {
        errors[i] = errors[i] + simd_shuffle_xor(errors[i], step);
      }
    }
    for (int h = E / 2; h > 0; h /= 2) {
      for (int i = 0; i < h; ++i) {
        errors[i] = errors[i] + errors[i + h];
      }
    }
    return errors[0];
  }

  template <int D, int E>
  static METAL_FUNC bool store(thread float* x, uint lane, ulong row, device Code* codes, device Scale* scales) {
    bool finite = true;
    for (int i = 0; i < E; ++i) {
      finite = finite && (as_type<uint>(x[i]) & 0x7F800000u) != 0x7F800000u;
    }
    finite = simd_all(finite);
    float top = 0.0f;
    for (int i = 0; i < E; ++i) {
      x[i] = finite ? x[i] : 0.0f;
      top = max(top, fabs(x[i]));
    }
    top = simd_max(top);
    constexpr int here = E < 8 ? E : 8;  // codes in one word that this lane has
    half best = half(0.0f);
    float best_error = 0.0f;
    uint best_indices[E / here];
    for (int w = 0; w < E / here; ++w) {
      best_indices[w] = 0u;
    }
    for (int candidate = 0; candidate < 5; ++candidate) {
      const half rounded = half(min(top * as_type<float>(FP4_FACTORS[candidate]), 65504.0f));
      const float scale = float(rounded);
      uint indices[E / here];
      float errors[E];
      for (int i = 0; i < E; ++i) {
        const uint index = nearest(fabs(x[i]), scale);
        const float difference = fabs(x[i]) - scale * magnitude(index);
        // keeps the compiler from fusing this product into the sum
        errors[i] = fma(difference, difference, 0.0f);
        indices[i / here] = (i % here > 0 ? indices[i / here] : 0u) | index << (4 * (i % here));
      }
      const float error = tree_sum<E>(errors);
      if (scale > 0.0f && (best == half(0.0f) || error < best_error)) {
        best = rounded;
        best_error = error;
        for (int w = 0; w < E / here; ++w) {
          best_indices[w] = indices[w];
        }
      }
    }
    for (int w = 0; w < E / here; ++w) {
      uint word = 0;
      for (int i = 0; i < here; ++i) {
        const uint sign = as_type<uint>(x[w * here + i]) >> 31;
        word |= ((best_indices[w] >> (4 * i) & 7u) | sign << 3) << (4 * i);
      }
      word = (best == half(0.0f) ? 0u : word) << (lane * E % 8 * 4);
      for (ushort step = 1; step < 8 / here; step *= 2) {
        word |= simd_shuffle_xor(word, step);
      }
      if (lane * E % 8 == 0 && lane * E + w * here < D) {
        codes[row * (D / 8) + lane * E / 8 + w] = word;
      }
    }
    if (lane == 0) {
      scales[row] = best;
    }
    return finite;
  }
};
