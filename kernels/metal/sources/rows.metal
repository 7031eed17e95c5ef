// Rows spread over a simdgroup: lane l has elements l * E to l * E + E - 1; elements D and above are zero.

template <int D, int E, typename P>
METAL_FUNC void load_row(P source, uint lane, thread float* x) {
  for (int i = 0; i < E; ++i) {
    x[i] = lane * E + i < D ? float(source[lane * E + i]) : 0.0f;
  }
}

// Applies the Sylvester-Hadamard rotation, its own inverse, with additions in the page formats' order h = 1,
// 2, 4, ... It rotates blocks of b values, the largest power of two that divides D; `norm` is float32(1 /
// sqrt(b)). Since D is a multiple of 8, a lane's E values are in one block.
template <int D, int E>
METAL_FUNC void hadamard(thread float* x, uint lane, float norm) {
  for (int h = 1; h < E; h *= 2) {
    for (int i = 0; i < E; ++i) {
      if ((i & h) == 0) {
        const float low = x[i], high = x[i + h];
        x[i] = low + high;
        x[i + h] = low - high;
      }
    }
  }
  for (ushort step = 1; step < (D & -D) / E; step *= 2) {
    for (int i = 0; i < E; ++i) {
      const float other = simd_shuffle_xor(x[i], step);
      x[i] = (lane & step) != 0 ? other - x[i] : x[i] + other;
    }
  }
  for (int i = 0; i < E; ++i) {
    x[i] *= norm;
  }
}
