// affine8 and affine4 pages: unsigned codes in uint32 words, and an fp16 scale and bias per 64 values.

template <int BITS>
struct Affine {
  typedef uint Code;
  typedef half Scale;
  typedef float Tile;  // values in threadgroup tiles are already scaled
  typedef uint2 Raw;  // eight codes; with 4 bits, all are in the first word

  // Number of array elements per row.
  template <int D>
  static METAL_FUNC constexpr uint codes_per_row() { return D * BITS / 32; }
  template <int D>
  static METAL_FUNC constexpr uint scales_per_row() { return D / 32; }

  static METAL_FUNC float4 quad(uint word, uint first) {
    constexpr uint mask = (1u << BITS) - 1u;
    word >>= first;
    return float4(uint4(word, word >> BITS, word >> 2 * BITS, word >> 3 * BITS) & mask);
  }

  // Loads the octet (eight codes) at `codes`.
  static METAL_FUNC Raw load(const device Code* codes, const device Scale*, uint) {
    return BITS == 4 ? uint2(*codes, 0u) : *(const device uint2*)codes;
  }

  static METAL_FUNC void unpack(Raw raw, thread float4& low, thread float4& high) {
    low = quad(raw.x, 0);
    high = BITS == 4 ? quad(raw.x, 16) : quad(raw.y, 0);
  }

  template <int D>
  static METAL_FUNC float row_scale(const device Scale*, uint) { return 1.0f; }

  // Applies scales and biases; all lanes must call it, because one lane of each group reads them for the
  // others.
  template <int D>
  static METAL_FUNC void scale_octet(
      const device Scale* scales, uint row, uint octet, uint lane, bool reads, thread float4& low,
      thread float4& high) {
    float scale = 0.0f, bias = 0.0f;
    if (reads && octet % 8 == 0) {
      const half2 pair = ((const device half2*)scales)[row * (D / 64) + octet / 8];
      scale = float(pair.x);
      bias = float(pair.y);
    }
    scale = first_of_group<8>(scale, octet, lane);
    bias = first_of_group<8>(bias, octet, lane);
    low = low * scale + bias;
    high = high * scale + bias;
  }

  template <int D, int E>
  static METAL_FUNC bool store(thread float* x, uint lane, ulong row, device Code* codes, device Scale* scales) {
    constexpr float most = float((1 << BITS) - 1);
    bool storable = keep_finite<E>(x);
    float low = x[0], high = x[0];
    for (int i = 1; i < E; ++i) {
      low = min(low, x[i]);
      high = max(high, x[i]);
    }
    for (ushort lanes = 1; lanes < 64 / E; lanes *= 2) {
      low = min(low, simd_shuffle_xor(low, lanes));
      high = max(high, simd_shuffle_xor(high, lanes));
    }
    const bool from_low = fabs(low) > fabs(high);
    const float width = max((high - low) / most, as_type<float>(0x33D6BF95u));  // 1e-7, the smallest step
    const float edge = from_low ? low : high;
    float step = from_low ? width : -width, bias = 0.0f;
    const float count = rint(edge / step);
    if (count != 0.0f) {
      step = edge / count;
      bias = edge;
    }
    const half stored_step = half(step), stored_bias = half(bias);
    storable = storable && (as_type<ushort>(stored_step) & 0x7C00) != 0x7C00;
    storable = simd_all(storable && (as_type<ushort>(stored_bias) & 0x7C00) != 0x7C00);
    uint chosen[E];
    for (int i = 0; i < E; ++i) {
      chosen[i] = storable ? uint(clamp(rint((x[i] - bias) / step), 0.0f, most)) : 0u;
    }
    store_codes<BITS, D, E>(chosen, lane, row, codes);
    if (lane * E % 64 == 0 && lane * E < D) {
      scales[row * (D / 32) + lane * E / 32] = storable ? stored_step : half(0.0f);
      scales[row * (D / 32) + lane * E / 32 + 1] = storable ? stored_bias : half(0.0f);
    }
    return storable;
  }
};

typedef Affine<8> Affine8;
typedef Affine<4> Affine4;
