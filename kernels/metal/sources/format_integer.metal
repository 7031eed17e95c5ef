// int8 and int4 pages: two's-complement codes in uint32 words, element 0 lowest, one fp16 scale per row.

// FACTOR: the scale divided by absmax, as float32 bits. LOWEST_CODE: magnitude of the lowest code.
template <int BITS, uint FACTOR, uint LOWEST_CODE>
struct Integer {
  typedef uint Code;
  typedef half Scale;
  typedef half Tile;
  typedef uint2 Raw;  // eight codes; with 4 bits, all are in the first word

  // Number of array elements per row.
  template <int D>
  static METAL_FUNC constexpr uint codes_per_row() { return D * BITS / 32; }
  template <int D>
  static METAL_FUNC constexpr uint scales_per_row() { return 1; }

  // Converts four signed codes of a word; the first is at bit `first`.
  static METAL_FUNC float4 quad(uint word, uint first) {
    const uint top = 32 - BITS - first;
    return float4(
        as_type<int4>(uint4(word << top, word << (top - BITS), word << (top - 2 * BITS), word << (top - 3 * BITS))) >>
        (32 - BITS));
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
  static METAL_FUNC float row_scale(const device Scale* scales, uint row) { return float(scales[row]); }

  template <int D>
  static METAL_FUNC void scale_octet(
      const device Scale*, uint, uint, uint, bool, thread float4&, thread float4&) {}

  // Returns the code nearest to x / scale, ties to even. The quotient may be off by a rounding. So x is
  // compared with halves of codes times the scale, which are exact.
  static METAL_FUNC uint nearest(float x, float scale) {
    const float size = fabs(x);
    float k = floor(min(size / scale, float(1 << (BITS - 1))) + 0.5f);
    const float above = (k + 0.5f) * scale, below = (k - 0.5f) * scale;
    const bool odd = (uint(k) & 1u) != 0u;
    if (size > above || (odd && size == above)) {
      k += 1.0f;
    } else if (size < below || (odd && size == below)) {
      k -= 1.0f;
    }
    const bool negative = as_type<uint>(x) >> 31 != 0u;
    const uint code = min(uint(k), negative ? LOWEST_CODE : uint((1 << (BITS - 1)) - 1));
    return (negative ? 0u - code : code) & ((1u << BITS) - 1u);
  }

  template <int D, int E>
  static METAL_FUNC bool store(thread float* x, uint lane, ulong row, device Code* codes, device Scale* scales) {
    const bool finite = keep_finite<E>(x);
    const half rounded = half(min(group_top<32 * E, E>(x) * as_type<float>(FACTOR), 65504.0f));
    const float scale = float(rounded);
    uint chosen[E];
    for (int i = 0; i < E; ++i) {
      chosen[i] = scale > 0.0f ? nearest(x[i], scale) : 0u;
    }
    store_codes<BITS, D, E>(chosen, lane, row, codes);
    if (lane == 0) {
      scales[row] = rounded;
    }
    return finite;
  }
};

typedef Integer<8, 0x3C010204u, 127u> Int8;
typedef Integer<4, 0x3E124925u, 8u> Int4;
