// Common parts of the attention kernels decode, chunk, latent and reduce: visibility, and softmax in the log2
// domain. With a sliding window (WINDOW), a query sees the first KEEP positions, and all positions since
// SINCE(row, position).

// Initial maximum of logits, below every real logit. It is finite, so that differences are no NaNs and fast
// math is safe.
#define LOWEST (-1e30f)
#define LOG2_E 1.44269504088896340736f
// Unrolls a loop. A thread's arrays stay in registers only if all of their indices are constants.
#define UNROLL _Pragma("clang loop unroll(full)")
#define AS_LOOP _Pragma("clang loop unroll(disable)")
// Stops the compiler from moving loads or unpacking across this point, which would need more registers than
// there are.
#define KEEP_ORDER simdgroup_barrier(mem_flags::mem_none);

// Loads eight stored values (an octet): number `octet` of row `row`, whose length is D values.
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

// Tiles of keys that queries can see: `kept` tiles with the first KEEP positions, then `window` and all later
// tiles. Tiles in between are skipped, not masked.
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

// params[0]: factor of the queries (used elsewhere); params[1]: 1 / softcap; params[2]: softcap * log2(e)
METAL_FUNC float logit(float product, const device float* params) {
#if SOFTCAP
  product = params[2] * tanh(product * params[1]);
#endif
  return product;
}

// Returns the factor that normalizes a sum of values weighted by 2^(logit - top); `sum` is the sum of
// weights. An attention sink is one more logit (natural logarithm), with no value.
METAL_FUNC float normalizer(float top, float sum, float sink) {
#if SINKS
  const float joint = max(top, sink * LOG2_E);
  const float factor = fast::exp2(top - joint);
  return factor / (sum * factor + fast::exp2(sink * LOG2_E - joint));
#else
  return 1.0f / sum;
#endif
}

// Writes an unnormalized sum of values over some of the keys, with its largest logit and its sum of weights.
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
    stats[4 * at + 2] = 0.0f;  // padded to four numbers, so that the buffer has at least 8
    stats[4 * at + 3] = 0.0f;
  }
}

// Normalizes one head's output, undoes V's rotation, and writes the row.
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
