// bf16 and fp16 pages: 16-bit values without scales. An octet is 8 values, 16 bytes.

struct HalfOctet {
  // Stores a whole row, or zeros if any of its values is not finite.
  template <int D, int E>
  static METAL_FUNC bool write(thread const ushort* bits, ushort exponent, uint lane, ulong row, device ushort* codes) {
    bool finite = true;
    for (int i = 0; i < E; ++i) {
      finite = finite && (bits[i] & exponent) != exponent;
    }
    finite = simd_all(finite);
    for (int i = 0; i < E; ++i) {
      if (lane * E + i < D) {
        codes[row * D + lane * E + i] = finite ? bits[i] : ushort(0);
      }
    }
    return finite;
  }
};

struct Fp16 {
  typedef float16_t Code;
  typedef half Scale;
  typedef half Tile;  // type in threadgroup tiles; holds every value exactly
  typedef uint4 Raw;  // eight values as they are stored

  // Number of array elements per row.
  template <int D>
  static METAL_FUNC constexpr uint codes_per_row() { return D; }
  template <int D>
  static METAL_FUNC constexpr uint scales_per_row() { return 0; }

  // Loads the octet at `codes`: eight values.
  static METAL_FUNC Raw load(const device Code* codes, const device Scale*, uint) {
    return *(const device uint4*)codes;
  }

  static METAL_FUNC void unpack(Raw words, thread float4& low, thread float4& high) {
    low = float4(as_type<half4>(words.xy));
    high = float4(as_type<half4>(words.zw));
  }

  template <int D>
  static METAL_FUNC float row_scale(const device Scale*, uint) { return 1.0f; }

  template <int D>
  static METAL_FUNC void scale_octet(
      const device Scale*, uint, uint, uint, bool, thread float4&, thread float4&) {}

  template <int D, int E>
  static METAL_FUNC bool store(thread float* x, uint lane, ulong row, device Code* codes, device Scale*) {
    ushort bits[E];
    for (int i = 0; i < E; ++i) {
      bits[i] = as_type<ushort>(half(x[i]));  // rounds to nearest, ties to even; above 65504: infinity
    }
    return HalfOctet::write<D, E>(bits, 0x7C00, lane, row, (device ushort*)codes);
  }
};

struct Bf16 {
  typedef bfloat16_t Code;
  typedef half Scale;
  typedef bfloat16_t Tile;
  typedef uint4 Raw;

  // Number of array elements per row.
  template <int D>
  static METAL_FUNC constexpr uint codes_per_row() { return D; }
  template <int D>
  static METAL_FUNC constexpr uint scales_per_row() { return 0; }

  // Loads the octet at `codes`: eight values.
  static METAL_FUNC Raw load(const device Code* codes, const device Scale*, uint) {
    return *(const device uint4*)codes;
  }

  static METAL_FUNC void unpack(Raw words, thread float4& low, thread float4& high) {
    const uint4 even = words << 16, odd = words & 0xFFFF0000u;
    low = float4(as_type<float>(even.x), as_type<float>(odd.x), as_type<float>(even.y), as_type<float>(odd.y));
    high = float4(as_type<float>(even.z), as_type<float>(odd.z), as_type<float>(even.w), as_type<float>(odd.w));
  }

  template <int D>
  static METAL_FUNC float row_scale(const device Scale*, uint) { return 1.0f; }

  template <int D>
  static METAL_FUNC void scale_octet(
      const device Scale*, uint, uint, uint, bool, thread float4&, thread float4&) {}

  template <int D, int E>
  static METAL_FUNC bool store(thread float* x, uint lane, ulong row, device Code* codes, device Scale*) {
    ushort bits[E];
    for (int i = 0; i < E; ++i) {
      // Rounds with integer operations, to nearest with ties to even, because some devices flush subnormal
      // floats to zero.
      const uint wide = as_type<uint>(x[i]);
      const bool finite = (wide & 0x7F800000u) != 0x7F800000u;
      bits[i] = ushort((finite ? wide + 0x7FFFu + (wide >> 16 & 1u) : wide) >> 16);
    }
    return HalfOctet::write<D, E>(bits, 0x7F80, lane, row, (device ushort*)codes);
  }
};
