// AVX-512 (and some SSE and AVX) except the dot products: memory, arithmetic, conversions, shuffles.
#pragma once

#include "emulated_vectors.h"

#define OCTAVO_LANES(T, x) ((x86_emulator::Lanes<T>)(x))

// ---- memory ----

#define _MM_HINT_T0 3
#define _MM_HINT_T1 2
#define _mm_prefetch(address, hint) ((void)(address))

OCTAVO_EMULATED __m128i _mm_load_si128(const __m128i* from) {
  return x86_emulator::read_aligned<__m128i>(from);
}
OCTAVO_EMULATED __m128i _mm_loadu_si128(const __m128i* from) { return x86_emulator::read<__m128i>(from); }
OCTAVO_EMULATED __m256i _mm256_loadu_si256(const __m256i* from) { return x86_emulator::read<__m256i>(from); }
OCTAVO_EMULATED __m256 _mm256_loadu_ps(const void* from) { return x86_emulator::read<__m256>(from); }
OCTAVO_EMULATED __m512 _mm512_loadu_ps(const void* from) { return x86_emulator::read<__m512>(from); }
OCTAVO_EMULATED __m512i _mm512_loadu_si512(const void* from) { return x86_emulator::read<__m512i>(from); }
OCTAVO_EMULATED __m512i _mm512_load_si512(const void* from) {
  return x86_emulator::read_aligned<__m512i>(from);
}
OCTAVO_EMULATED __m512i _mm512_maskz_loadu_epi8(__mmask64 mask, const void* from) {
  return (__m512i)x86_emulator::read_masked<int8_t>(mask, from);
}
OCTAVO_EMULATED __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
  return (__m512i)x86_emulator::read_masked<int16_t>(mask, from);
}
OCTAVO_EMULATED void _mm_storeu_si128(__m128i* to, __m128i value) { x86_emulator::write(to, value); }
OCTAVO_EMULATED void _mm256_storeu_si256(__m256i* to, __m256i value) { x86_emulator::write(to, value); }
OCTAVO_EMULATED __m512 _mm512_load_ps(const void* from) { return x86_emulator::read_aligned<__m512>(from); }
OCTAVO_EMULATED void _mm512_store_ps(void* to, __m512 value) {
  if (reinterpret_cast<uintptr_t>(to) % 64 != 0) x86_emulator::fault("an aligned store is not aligned");
  x86_emulator::write(to, value);
}
// The lower half of a register.
OCTAVO_EMULATED __m128i _mm_loadl_epi64(const __m128i* from) {
  return __m128i{x86_emulator::read<long long>(from), 0};
}
OCTAVO_EMULATED void _mm_storel_epi64(__m128i* to, __m128i value) { x86_emulator::write(to, value[0]); }
OCTAVO_EMULATED void _mm512_storeu_ps(void* to, __m512 value) { x86_emulator::write(to, value); }
OCTAVO_EMULATED void _mm512_storeu_si512(void* to, __m512i value) { x86_emulator::write(to, value); }
OCTAVO_EMULATED void _mm512_store_si512(void* to, __m512i value) {
  if (reinterpret_cast<uintptr_t>(to) % 64 != 0) x86_emulator::fault("an aligned store is not aligned");
  x86_emulator::write(to, value);
}

// ---- constants and casts ----

OCTAVO_EMULATED __m512 _mm512_setzero_ps() { return __m512{}; }
OCTAVO_EMULATED __m512i _mm512_setzero_si512() { return __m512i{}; }
OCTAVO_EMULATED __m512 _mm512_set1_ps(float value) { return value - __m512{}; }  // keeps the sign of -0
OCTAVO_EMULATED __m512i _mm512_set1_epi32(int value) { return (__m512i)(x86_emulator::Lanes<int32_t>{} + value); }
OCTAVO_EMULATED __m512i _mm512_set1_epi16(short value) { return (__m512i)(x86_emulator::Lanes<int16_t>{} + value); }
OCTAVO_EMULATED __m512i _mm512_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k,
                                          int l, int m, int n, int o, int p) {
  return (__m512i)(x86_emulator::Lanes<int32_t>{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p});
}
OCTAVO_EMULATED __m512i _mm512_set1_epi8(char value) {
  return (__m512i)(x86_emulator::Lanes<int8_t>{} + int8_t(value));
}
OCTAVO_EMULATED __m512i _mm512_castps_si512(__m512 value) { return (__m512i)value; }
OCTAVO_EMULATED __m512 _mm512_castsi512_ps(__m512i value) { return (__m512)value; }
OCTAVO_EMULATED float _mm512_cvtss_f32(__m512 value) { return value[0]; }
OCTAVO_EMULATED __m512i _mm512_broadcast_i32x4(__m128i value) {
  return __m512i{value[0], value[1], value[0], value[1], value[0], value[1], value[0], value[1]};
}

OCTAVO_EMULATED __m128i _mm_setr_epi32(int a, int b, int c, int d) {
  typedef int Four __attribute__((vector_size(16)));
  return (__m128i)Four{a, b, c, d};
}

// ---- masks: a bit for each element ----

#define _CMP_LE_OQ 18
#define _CMP_GE_OQ 29

// Compares: a bit is set if a <= b (or a >= b) and neither is NaN.
OCTAVO_EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (predicate == _CMP_LE_OQ ? a[i] <= b[i] : a[i] >= b[i]) << i;
  return mask;
}
// Supports only the class of subnormal numbers, because kernels use no other.
OCTAVO_EMULATED __mmask16 _mm512_fpclass_ps_mask(__m512 a, int classes) {
  __mmask16 to = 0;
  for (int i = 0; i < 16; ++i) to |= __mmask16((classes & 0x20) != 0 && std::fpclassify(a[i]) == FP_SUBNORMAL) << i;
  return to;
}
OCTAVO_EMULATED __mmask16 _mm512_movepi32_mask(__m512i a) {  // the signs
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (OCTAVO_LANES(int32_t, a)[i] < 0) << i;
  return mask;
}
OCTAVO_EMULATED __mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (OCTAVO_LANES(int32_t, a & b)[i] != 0) << i;
  return mask;
}
OCTAVO_EMULATED __mmask64 _mm512_test_epi8_mask(__m512i a, __m512i b) {
  int8_t both[64];
  const __m512i bits = a & b;
  std::memcpy(both, &bits, 64);
  __mmask64 mask = 0;
  for (int i = 0; i < 64; ++i) mask |= __mmask64(both[i] != 0) << i;
  return mask;
}
// `set` where the mask has a 1, else `unset`.
template <class T>
OCTAVO_EMULATED __m512i octavo_select(uint64_t mask, __m512i set, __m512i unset) {
  x86_emulator::Lanes<T> to = (x86_emulator::Lanes<T>)unset;
  for (int i = 0; i < int(64 / sizeof(T)); ++i)
    if (mask >> i & 1) to[i] = ((x86_emulator::Lanes<T>)set)[i];
  return (__m512i)to;
}
OCTAVO_EMULATED __m512i _mm512_mask_blend_epi16(__mmask32 mask, __m512i unset, __m512i set) {
  return octavo_select<int16_t>(mask, set, unset);
}
OCTAVO_EMULATED __m512i _mm512_maskz_mov_epi32(__mmask16 mask, __m512i set) {
  return octavo_select<int32_t>(mask, set, __m512i{});
}
OCTAVO_EMULATED __m512 _mm512_mask_mov_ps(__m512 unset, __mmask16 mask, __m512 set) {
  return (__m512)octavo_select<int32_t>(mask, (__m512i)set, (__m512i)unset);
}
OCTAVO_EMULATED __m512 _mm512_maskz_compress_ps(__mmask16 mask, __m512 a) {
  __m512 to = {};
  for (int i = 0, next = 0; i < 16; ++i)
    if (mask >> i & 1) to[next++] = a[i];
  return to;
}

// ---- float arithmetic ----

OCTAVO_EMULATED __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }

OCTAVO_EMULATED __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
OCTAVO_EMULATED __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
OCTAVO_EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }  // b if either is NaN
OCTAVO_EMULATED __m512 _mm512_abs_ps(__m512 a) { return (__m512)(OCTAVO_LANES(int32_t, a) & 0x7fffffff); }
OCTAVO_EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; ++i) c[i] = std::fmaf(a[i], b[i], c[i]);
  return c;
}

// The intrinsic is a sequence of instructions; halves are added to each other in the order that GCC chooses.
OCTAVO_EMULATED float _mm512_reduce_add_ps(__m512 a) {
  float sums[16];
  std::memcpy(sums, &a, 64);
  for (int i = 0; i < 8; ++i) sums[i] = sums[8 + i] + sums[i];
  for (int i = 0; i < 4; ++i) sums[i] = sums[4 + i] + sums[i];
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}
OCTAVO_EMULATED float _mm512_reduce_max_ps(__m512 a) {
  float largest = a[0];
  for (int i = 1; i < 16; ++i) largest = a[i] > largest ? a[i] : largest;
  return largest;
}

// ---- integer arithmetic ----

OCTAVO_EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
OCTAVO_EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
OCTAVO_EMULATED __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return (__m512i)(OCTAVO_LANES(uint32_t, a) + OCTAVO_LANES(uint32_t, b));
}
OCTAVO_EMULATED __m512i _mm512_sub_epi32(__m512i a, __m512i b) {
  return (__m512i)(OCTAVO_LANES(uint32_t, a) - OCTAVO_LANES(uint32_t, b));
}
OCTAVO_EMULATED __m512i _mm512_add_epi8(__m512i a, __m512i b) {
  return (__m512i)(OCTAVO_LANES(uint8_t, a) + OCTAVO_LANES(uint8_t, b));
}
// Returns the low halves of the products.
OCTAVO_EMULATED __m512i _mm512_mullo_epi32(__m512i a, __m512i b) {
  return (__m512i)(OCTAVO_LANES(uint32_t, a) * OCTAVO_LANES(uint32_t, b));
}
OCTAVO_EMULATED __m512i _mm512_mullo_epi16(__m512i a, __m512i b) {
  return (__m512i)(OCTAVO_LANES(uint16_t, a) * OCTAVO_LANES(uint16_t, b));
}
OCTAVO_EMULATED __m512i _mm512_mask_add_epi32(__m512i unset, __mmask16 mask, __m512i a, __m512i b) {
  return octavo_select<int32_t>(mask, _mm512_add_epi32(a, b), unset);
}
OCTAVO_EMULATED __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
OCTAVO_EMULATED __m512i _mm512_max_epi32(__m512i a, __m512i b) {
  return (__m512i)(OCTAVO_LANES(int32_t, a) > OCTAVO_LANES(int32_t, b) ? OCTAVO_LANES(int32_t, a)
                                                                       : OCTAVO_LANES(int32_t, b));
}
OCTAVO_EMULATED __m512i _mm512_max_epu16(__m512i a, __m512i b) {
  return (__m512i)(OCTAVO_LANES(uint16_t, a) > OCTAVO_LANES(uint16_t, b) ? OCTAVO_LANES(uint16_t, a)
                                                                         : OCTAVO_LANES(uint16_t, b));
}
// A shift by the width or more gives zero; an arithmetic one gives the sign in every bit.
OCTAVO_EMULATED __m512i _mm512_srai_epi32(__m512i a, unsigned count) {
  return (__m512i)(OCTAVO_LANES(int32_t, a) >> int(count > 31 ? 31 : count));
}
OCTAVO_EMULATED __m512i _mm512_srli_epi64(__m512i a, unsigned count) {
  return count > 63 ? __m512i{} : (__m512i)(OCTAVO_LANES(uint64_t, a) >> uint64_t(count));
}
OCTAVO_EMULATED __m512i _mm512_slli_epi32(__m512i a, unsigned count) {
  return count > 31 ? __m512i{} : (__m512i)(OCTAVO_LANES(uint32_t, a) << count);
}
OCTAVO_EMULATED __m512i _mm512_srli_epi32(__m512i a, unsigned count) {
  return count > 31 ? __m512i{} : (__m512i)(OCTAVO_LANES(uint32_t, a) >> count);
}
OCTAVO_EMULATED __m512i _mm512_srli_epi16(__m512i a, unsigned count) {
  return count > 15 ? __m512i{} : (__m512i)(OCTAVO_LANES(uint16_t, a) >> uint16_t(count));
}
OCTAVO_EMULATED int _mm512_reduce_max_epi32(__m512i a) {
  int32_t top = OCTAVO_LANES(int32_t, a)[0];
  for (int i = 1; i < 16; ++i) top = OCTAVO_LANES(int32_t, a)[i] > top ? OCTAVO_LANES(int32_t, a)[i] : top;
  return top;
}
OCTAVO_EMULATED int _mm512_reduce_add_epi32(__m512i a) {
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += OCTAVO_LANES(uint32_t, a)[i];
  return int(sum);
}

// ---- conversions ----

OCTAVO_EMULATED __m512 _mm512_cvtepi32_ps(__m512i a) {
  return __builtin_convertvector(OCTAVO_LANES(int32_t, a), __m512);
}
OCTAVO_EMULATED __m512i _mm512_cvtps_epi32(__m512 a) {
  x86_emulator::Lanes<int32_t> to;
  for (int i = 0; i < 16; ++i) to[i] = x86_emulator::float_to_int(a[i]);
  return (__m512i)to;
}
OCTAVO_EMULATED __m512i _mm512_cvtepu16_epi32(__m256i a) {
  typedef uint16_t Words __attribute__((vector_size(32)));
  return (__m512i)__builtin_convertvector((Words)a, x86_emulator::Lanes<uint32_t>);
}
OCTAVO_EMULATED __m512i _mm512_cvtepu8_epi32(__m128i a) {
  return (__m512i)__builtin_convertvector((x86_emulator::Lanes128<uint8_t>)a, x86_emulator::Lanes<uint32_t>);
}
OCTAVO_EMULATED __m128i _mm512_cvtepi64_epi8(__m512i a) {  // the low byte of each; zeros above
  __m128i to = {};
  for (int i = 0; i < 8; ++i) to[0] = (long long)((unsigned long long)to[0] | (a[i] & 255ull) << (8 * i));
  return to;
}
OCTAVO_EMULATED __m128i _mm512_cvtepi32_epi8(__m512i a) {  // the low byte of each
  return (__m128i)__builtin_convertvector(OCTAVO_LANES(int32_t, a), x86_emulator::Lanes128<int8_t>);
}
OCTAVO_EMULATED __m128i _mm512_cvtsepi32_epi8(__m512i a) {  // saturated
  x86_emulator::Lanes128<int8_t> to;
  for (int i = 0; i < 16; ++i) {
    const int32_t value = OCTAVO_LANES(int32_t, a)[i];
    to[i] = int8_t(value < -128 ? -128 : value > 127 ? 127 : value);
  }
  return (__m128i)to;
}
OCTAVO_EMULATED __m512 _mm512_cvtph_ps(__m256i a) {
  uint16_t halves[16];
  std::memcpy(halves, &a, 32);
  __m512 to;
  for (int i = 0; i < 16; ++i) to[i] = x86_emulator::half_to_float(halves[i]);
  return to;
}
OCTAVO_EMULATED __m512 _mm512_maskz_cvtph_ps(__mmask16 mask, __m256i a) {
  __m512 to = _mm512_cvtph_ps(a);
  for (int i = 0; i < 16; ++i) to[i] = mask >> i & 1 ? to[i] : 0.0f;
  return to;
}
OCTAVO_EMULATED __m256 _mm256_cvtph_ps(__m128i a) {
  return __builtin_ia32_vcvtph2ps256((x86_emulator::Lanes128<short>)a);
}
#define _mm256_cvtps_ph(a, rounding) ((__m128i)__builtin_ia32_vcvtps2ph256(a, rounding))
OCTAVO_EMULATED __m512d _mm512_cvtps_pd(__m256 a) { return __builtin_convertvector(a, __m512d); }
OCTAVO_EMULATED __m256bh _mm512_cvtneps_pbh(__m512 a) {
  __m256bh to;
  for (int i = 0; i < 16; ++i) to[i] = x86_emulator::float_to_bf16(a[i]);
  return to;
}
OCTAVO_EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 upper, __m512 lower) {
  __m512bh to;
  for (int i = 0; i < 32; ++i) to[i] = x86_emulator::float_to_bf16(i < 16 ? lower[i] : upper[i - 16]);
  return to;
}

// ---- shuffles ----

// Interleaves the elements of the lower (upper) halves of a and b, within each 128 bits.
template <class T, bool kUpper>
OCTAVO_EMULATED __m512i octavo_unpack(__m512i a, __m512i b) {
  constexpr int kLane = int(16 / sizeof(T));
  const x86_emulator::Lanes<T> x = (x86_emulator::Lanes<T>)a, y = (x86_emulator::Lanes<T>)b;
  x86_emulator::Lanes<T> to;
  for (int i = 0; i < 4 * kLane; ++i) {
    const int from = i / kLane * kLane + i % kLane / 2 + (kUpper ? kLane / 2 : 0);
    to[i] = i % 2 == 0 ? x[from] : y[from];
  }
  return (__m512i)to;
}
OCTAVO_EMULATED __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) { return octavo_unpack<int8_t, false>(a, b); }
OCTAVO_EMULATED __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) { return octavo_unpack<int8_t, true>(a, b); }
OCTAVO_EMULATED __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) { return octavo_unpack<int16_t, false>(a, b); }
OCTAVO_EMULATED __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) { return octavo_unpack<int16_t, true>(a, b); }
OCTAVO_EMULATED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) { return octavo_unpack<int32_t, false>(a, b); }
OCTAVO_EMULATED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) { return octavo_unpack<int32_t, true>(a, b); }
OCTAVO_EMULATED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return octavo_unpack<int64_t, false>(a, b); }
OCTAVO_EMULATED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return octavo_unpack<int64_t, true>(a, b); }

// VPACK*: each 128 bits get the elements of a, then those of b, saturated to half their width.
template <class From, class To>
OCTAVO_EMULATED __m512i octavo_pack(__m512i a, __m512i b) {
  constexpr int kLane = 16 / sizeof(From);
  const x86_emulator::Lanes<From> x = (x86_emulator::Lanes<From>)a, y = (x86_emulator::Lanes<From>)b;
  To to[64 / sizeof(To)];
  for (int i = 0; i < int(64 / sizeof(To)); ++i) {
    const int from = i / (2 * kLane) * kLane + i % kLane;
    const From value = i / kLane % 2 == 0 ? x[from] : y[from];
    constexpr From kLeast = std::numeric_limits<To>::min(), kMost = std::numeric_limits<To>::max();
    to[i] = To(value < kLeast ? kLeast : value > kMost ? kMost : value);
  }
  return x86_emulator::read<__m512i>(to);
}
OCTAVO_EMULATED __m512i _mm512_packs_epi32(__m512i a, __m512i b) { return octavo_pack<int32_t, int16_t>(a, b); }
OCTAVO_EMULATED __m512i _mm512_packs_epi16(__m512i a, __m512i b) { return octavo_pack<int16_t, int8_t>(a, b); }

// VPSHUFB: each byte of the index looks up its own 128 bits; a byte with its top bit set gives zero.
OCTAVO_EMULATED __m512i _mm512_shuffle_epi8(__m512i a, __m512i index) {
  int8_t from[64], at[64], to[64];
  std::memcpy(from, &a, 64);
  std::memcpy(at, &index, 64);
  for (int i = 0; i < 64; ++i) to[i] = at[i] < 0 ? int8_t(0) : from[i / 16 * 16 + (at[i] & 15)];
  return x86_emulator::read<__m512i>(to);
}

OCTAVO_EMULATED __m512i _mm512_mask_shuffle_epi8(__m512i unset, __mmask64 mask, __m512i a, __m512i index) {
  return octavo_select<int8_t>(mask, _mm512_shuffle_epi8(a, index), unset);
}
OCTAVO_EMULATED __m128i _mm_shuffle_epi8(__m128i a, __m128i index) {
  int8_t from[16], at[16], to[16];
  std::memcpy(from, &a, 16);
  std::memcpy(at, &index, 16);
  for (int i = 0; i < 16; ++i) to[i] = at[i] < 0 ? int8_t(0) : from[at[i] & 15];
  return x86_emulator::read<__m128i>(to);
}

// Rows of codes as floats, with 128 and 256 bits.
template <class... Values>
OCTAVO_EMULATED __m128i _mm_setr_epi8(Values... values) {
  static_assert(sizeof...(values) == 16);
  const int8_t bytes[16] = {int8_t(values)...};
  return x86_emulator::read<__m128i>(bytes);
}
template <class Byte>
OCTAVO_EMULATED __m256i octavo_widened(__m128i a) {
  Byte from[16];
  int32_t to[8];
  std::memcpy(from, &a, 16);
  for (int i = 0; i < 8; ++i) to[i] = from[i];
  return x86_emulator::read<__m256i>(to);
}
OCTAVO_EMULATED __m256i _mm256_cvtepi8_epi32(__m128i a) { return octavo_widened<int8_t>(a); }
OCTAVO_EMULATED __m256i _mm256_cvtepu8_epi32(__m128i a) { return octavo_widened<uint8_t>(a); }
OCTAVO_EMULATED __m256 _mm256_cvtepi32_ps(__m256i a) {
  int32_t from[8];
  std::memcpy(from, &a, 32);
  __m256 to;
  for (int i = 0; i < 8; ++i) to[i] = float(from[i]);
  return to;
}
OCTAVO_EMULATED __m256 _mm256_set1_ps(float value) { return __m256{} + value; }
OCTAVO_EMULATED __m256 _mm256_mul_ps(__m256 a, __m256 b) { return a * b; }
OCTAVO_EMULATED __m256 _mm256_add_ps(__m256 a, __m256 b) { return a + b; }
OCTAVO_EMULATED void _mm256_storeu_ps(void* to, __m256 value) { x86_emulator::write(to, value); }

// VPSHUFD: within each 128 bits, two bits of `select` choose each word.
typedef int _MM_PERM_ENUM;
OCTAVO_EMULATED __m512i _mm512_shuffle_epi32(__m512i a, _MM_PERM_ENUM select) {
  x86_emulator::Lanes<int32_t> to;
  for (int i = 0; i < 16; ++i) to[i] = OCTAVO_LANES(int32_t, a)[i / 4 * 4 + (select >> (2 * (i % 4)) & 3)];
  return (__m512i)to;
}

// VPERMD and VPERMPS take any element of the register.
OCTAVO_EMULATED __m512i _mm512_permutexvar_epi32(__m512i index, __m512i a) {
  x86_emulator::Lanes<int32_t> to;
  for (int i = 0; i < 16; ++i) to[i] = OCTAVO_LANES(int32_t, a)[OCTAVO_LANES(int32_t, index)[i] & 15];
  return (__m512i)to;
}
OCTAVO_EMULATED __m512 _mm512_permutexvar_ps(__m512i index, __m512 a) {
  return (__m512)_mm512_permutexvar_epi32(index, (__m512i)a);
}

// VSHUFI32X4: the two lower 128 bits come from a, the two upper ones from b.
OCTAVO_EMULATED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int select) {
  __m512i to;
  for (int lane = 0; lane < 4; ++lane) {
    const __m512i& from = lane < 2 ? a : b;
    const int at = select >> (2 * lane) & 3;
    to[2 * lane] = from[2 * at];
    to[2 * lane + 1] = from[2 * at + 1];
  }
  return to;
}

// The CPU's own control word, which affects the emulated operations, too.
OCTAVO_EMULATED unsigned _mm_getcsr() { return __builtin_ia32_stmxcsr(); }
OCTAVO_EMULATED void _mm_setcsr(unsigned control) { __builtin_ia32_ldmxcsr(control); }
