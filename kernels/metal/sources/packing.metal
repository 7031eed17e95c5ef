// Common parts of the formats with packed codes.

// Returns whether all values of the row are finite. If not, sets them to zero.
template <int E>
METAL_FUNC bool keep_finite(thread float* x) {
  bool finite = true;
  for (int i = 0; i < E; ++i) {
    finite = finite && (as_type<uint>(x[i]) & 0x7F800000u) != 0x7F800000u;
  }
  finite = simd_all(finite);
  for (int i = 0; i < E; ++i) {
    x[i] = finite ? x[i] : 0.0f;
  }
  return finite;
}

// Returns the largest magnitude in the group of N consecutive values to which this lane's E values belong.
template <int N, int E>
METAL_FUNC float group_top(thread const float* x) {
  float top = 0.0f;
  for (int i = 0; i < E; ++i) {
    top = max(top, fabs(x[i]));
  }
  for (ushort step = 1; step < N / E; step *= 2) {
    top = max(top, simd_shuffle_xor(top, step));
  }
  return top;
}

// Packs a row's codes of BITS bits, E per lane, into words, element 0 lowest.
template <int BITS, int D, int E>
METAL_FUNC void store_codes(thread const uint* codes, uint lane, ulong row, device uint* words) {
  constexpr int per_word = 32 / BITS;
  constexpr int here = E < per_word ? E : per_word;  // codes in one word that this lane has
  for (int w = 0; w < E / here; ++w) {
    uint word = 0;
    for (int i = 0; i < here; ++i) {
      word |= codes[w * here + i] << ((lane * E + i) % per_word * BITS);
    }
    for (ushort step = 1; step < per_word / here; step *= 2) {
      word |= simd_shuffle_xor(word, step);
    }
    if (lane * E % per_word == 0 && lane * E + w * here < D) {
      words[row * (D / per_word) + lane * E / per_word + w] = word;
    }
  }
}

// Returns the first lane's `x` in each group of OCTETS octets of a row; each lane has one octet.
template <int OCTETS>
METAL_FUNC float first_of_group(float x, uint octet, uint lane) {
  return simd_shuffle(x, ushort(lane - octet % OCTETS));
}
