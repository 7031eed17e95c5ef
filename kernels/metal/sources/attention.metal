// What decode, chunk and reduce share: which positions a query sees, and softmax in log2 space.
// Where there are windows (WINDOW) a query sees the first KEEP positions, and those from SINCE(row, position) on.

// Below every logit; finite, so that no difference of two is NaN and fast math changes nothing.
#define LOWEST (-1e30f)
#define LOG2_E 1.44269504088896340736f
// Arrays of a thread are registers only if nothing but constants indexes them.
#define UNROLL _Pragma("clang loop unroll(full)")
#define AS_LOOP _Pragma("clang loop unroll(disable)")
// Compilers that load or unpack a stage all at once need more registers than there are.
#define KEEP_ORDER simdgroup_barrier(mem_flags::mem_none);

// Octet `octet` of row `row` of D values, as it is stored.
template <typename Format, int D>
METAL_FUNC typename Format::Raw load_octet(
    const device typename Format::Code* codes, const device typename Format::Scale* scales, uint row, uint octet) {
  constexpr uint code_row = Format::template codes_per_row<D>(), scale_row = Format::template scales_per_row<D>();
  return Format::load(
      codes + (ulong(row) * code_row + octet * (code_row / (D / 8))),
      scales + (ulong(row) * scale_row + octet * (scale_row / (D / 8))), octet);
}

METAL_FUNC bool is_visible(int key, int position, int since) {
#if WINDOW
  return key <= position && (key >= since || key < KEEP);
#else
  return key <= position;
#endif
}

// The tiles of keys that queries can see: some at the front (kept positions), then all from the window's
// first, `since`. Tiles between are skipped, not masked.
struct Span {
  int kept;
  int window;

  METAL_FUNC int tile(int index) const thread { return index < kept ? index : index - kept + window; }
};

template <int N>
METAL_FUNC Span span_from(int since) {
  Span span;
  span.kept = 0;
  span.window = 0;
#if WINDOW
  const int low = max(0, since);
  span.window = low / N;
  span.kept = min((min(KEEP, low) + N - 1) / N, span.window);
#endif
  return span;
}

// params: 0 factor of the queries, 1 1 / softcap, 2 softcap * log2(e)
METAL_FUNC float logit(float product, const device float* params) {
#if SOFTCAP
  product = params[2] * tanh(product * params[1]);
#endif
  return product;
}

// The factor that normalizes a sum of values weighted by 2^(logit - top): the weights' total is
// `sum`; a sink adds one logit (natural log) to it.
METAL_FUNC float normalizer(float top, float sum, float sink) {
#if SINKS
  const float joint = max(top, sink * LOG2_E);
  const float factor = fast::exp2(top - joint);
  return factor / (sum * factor + fast::exp2(sink * LOG2_E - joint));
#else
  return 1.0f / sum;
#endif
}

// Values that are yet to be joined with those of other keys, their largest logit and sum of weights.
METAL_FUNC void write_part(
    thread const float* x, float top, float sum, uint lane, uint at, device float* partial, device float* stats) {
  UNROLL
  for (int i = 0; i < VALUE_LANE; ++i) {
    if (lane * VALUE_LANE + i < VALUE_DIM) {
      partial[at * VALUE_DIM + lane * VALUE_LANE + i] = x[i];
    }
  }
  if (lane == 0) {
    stats[4 * at] = top;
    stats[4 * at + 1] = sum;
    stats[4 * at + 2] = 0.0f;  // four each, so that no launch has fewer than 8
    stats[4 * at + 3] = 0.0f;
  }
}

// Normalize, undo the rotation of V once, and write one head's output row.
template <typename T>
METAL_FUNC void write_output(thread float* x, float factor, uint lane, device T* out) {
  UNROLL
  for (int i = 0; i < VALUE_LANE; ++i) {
    x[i] *= factor;
  }
#if ROTATE_VALUES
  hadamard<VALUE_DIM, VALUE_LANE>(x, lane, as_type<float>(VALUE_NORM_BITS));
#endif
  UNROLL
  for (int i = 0; i < VALUE_LANE; ++i) {
    if (lane * VALUE_LANE + i < VALUE_DIM) {
      out[lane * VALUE_LANE + i] = T(x[i]);
    }
  }
}
