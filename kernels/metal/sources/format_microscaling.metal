// mxfp4 and nvfp4 pages: E2M1 codes stored as in fp4, and one byte of scale per 32 or 16 values.

struct E8M0 {
  // Returns the scale byte: the least power of two that is at least top / 6.
  static METAL_FUNC uint encode(float top) {
    return uint(clamp(int((as_type<uint>(top) + 0x3FFFFFu) >> 23) - 2, 0, 252));
  }

  static METAL_FUNC float value(uint code) { return as_type<float>(code == 0u ? 0x400000u : code << 23); }
};

struct E4M3 {
  // Returns the scale byte: the E4M3 value nearest to the correctly rounded quotient top / 6, ties to even.
  static METAL_FUNC uint encode(float top) {
    const float quotient = top / 6.0f;
    const uint bits = as_type<uint>(quotient);
    const uint normal = ((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - 960u;
    return min(quotient < 0.015625f ? uint(rint(quotient * 512.0f)) : normal, 126u);
  }

  static METAL_FUNC float value(uint code) {
    return code < 8u ? float(code) * 0.001953125f : as_type<float>((code + 960u) << 20);
  }
};

template <typename Byte, int N>
struct Microscaled {
  typedef uint Code;
  typedef uint8_t Scale;
  typedef bfloat16_t Tile;  // values in threadgroup tiles are already scaled, and exact
  typedef uint Raw;

  // Number of array elements per row.
  template <int D>
  static METAL_FUNC constexpr uint codes_per_row() { return D / 8; }
  template <int D>
  static METAL_FUNC constexpr uint scales_per_row() { return D / N; }

  // Loads the octet (eight codes) at `codes`.
  static METAL_FUNC Raw load(const device Code* codes, const device Scale*, uint) { return *codes; }

  static METAL_FUNC void unpack(Raw word, thread float4& low, thread float4& high) { Fp4::unpack(word, low, high); }

  template <int D>
  static METAL_FUNC float row_scale(const device Scale*, uint) { return 1.0f; }

  // Applies scales; all lanes must call it, because one lane of each group reads the scale for the others.
  template <int D>
  static METAL_FUNC void scale_octet(
      const device Scale* scales, uint row, uint octet, uint lane, bool reads, thread float4& low,
      thread float4& high) {
    float scale = 0.0f;
    if (reads && octet % (N / 8) == 0) {
      scale = Byte::value(scales[row * (D / N) + octet / (N / 8)]) * 16384.0f;
    }
    scale = first_of_group<N / 8>(scale, octet, lane);
    low *= scale;
    high *= scale;
  }

  template <int D, int E>
  static METAL_FUNC bool store(thread float* x, uint lane, ulong row, device Code* codes, device Scale* scales) {
    const bool finite = keep_finite<E>(x);
    const uint code = Byte::encode(group_top<N, E>(x));
    const float scale = Byte::value(code);
    uint chosen[E];
    for (int i = 0; i < E; ++i) {
      chosen[i] = scale > 0.0f ? Fp4::nearest(fabs(x[i]), scale) | as_type<uint>(x[i]) >> 31 << 3 : 0u;
      chosen[i] = finite ? chosen[i] : 0u;
    }
    store_codes<4, D, E>(chosen, lane, row, codes);
    if (lane * E % N == 0 && lane * E < D) {
      scales[row * (D / N) + lane * E / N] = Scale(finite ? code : 0u);
    }
    return finite;
  }
};

typedef Microscaled<E8M0, 32> Mxfp4;
typedef Microscaled<E4M3, 16> Nvfp4;
