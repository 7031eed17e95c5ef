// Checks every instruction of the emulator against values worked out by hand. On a CPU that has the
// instructions, this file is also compiled against the compiler's <immintrin.h>, which checks the values
// themselves. The program prints each value that differs, and exits with the number of differences.
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>

namespace {

int failures = 0;

void expect(bool holds, const char* what, int line) {
  if (holds) return;
  std::printf("line %d: %s\n", line, what);
  ++failures;
}
#define EXPECT(...) expect((__VA_ARGS__), #__VA_ARGS__, __LINE__)

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <class T>
struct Register {
  alignas(64) T at[64 / sizeof(T)] = {};

  template <class Fill>
  static Register of(Fill fill) {
    Register made;
    for (int i = 0; i < int(64 / sizeof(T)); ++i) made.at[i] = T(fill(i));
    return made;
  }
  template <class V>
  static Register from(V vector) {
    Register made;
    std::memcpy(made.at, &vector, sizeof(vector) < 64 ? sizeof(vector) : 64);
    return made;
  }
  operator __m512i() const { return _mm512_loadu_si512(at); }
  operator __m512() const { return _mm512_loadu_ps(at); }
};
using Bytes = Register<uint8_t>;
using Words = Register<uint16_t>;
using Ints = Register<int32_t>;
using Floats = Register<float>;

uint32_t bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

__m512bh pairs(const Words& words) {
  __m512bh pair;
  std::memcpy(&pair, words.at, 64);
  return pair;
}

void memory() {
  uint8_t bytes[65];
  for (int i = 0; i < 65; ++i) bytes[i] = uint8_t(i);
  const Bytes masked = Bytes::from(_mm512_maskz_loadu_epi8(0x8000000000000005, bytes + 1));
  EXPECT(masked.at[0] == 1 && masked.at[1] == 0 && masked.at[2] == 3 && masked.at[62] == 0 && masked.at[63] == 64);
  const Words words = Words::from(_mm512_maskz_loadu_epi16(0x80000002, bytes));
  EXPECT(words.at[0] == 0 && words.at[1] == 0x0302 && words.at[2] == 0 && words.at[31] == 0x3f3e);
  const unsigned control = _mm_getcsr();
  _mm_setcsr(control | 0x8040);  // subnormals are zeros
  EXPECT(_mm_getcsr() == (control | 0x8040));
  _mm_setcsr(control);
  EXPECT(_mm_getcsr() == control);
  alignas(64) Ints copied;
  _mm512_store_si512(copied.at, _mm512_load_si512(Ints::of([](int i) { return 3 * i; }).at));
  EXPECT(copied.at[15] == 45);
  const __m128i sixteen = _mm_load_si128(reinterpret_cast<const __m128i*>(copied.at));
  const Ints repeated = Ints::from(_mm512_broadcast_i32x4(sixteen));
  EXPECT(repeated.at[3] == 9 && repeated.at[4] == 0 && repeated.at[15] == 9);
  EXPECT(Bytes::from(_mm512_set1_epi8(-1)).at[17] == 255);
  uint8_t stored[65] = {};
  _mm512_storeu_si512(stored + 1, _mm512_set1_epi8(7));
  EXPECT(stored[0] == 0 && stored[1] == 7 && stored[64] == 7);
  _mm512_storeu_ps(stored, _mm512_setzero_ps());
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(stored + 1), _mm256_loadu_si256(reinterpret_cast<__m256i*>(bytes)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(stored + 33), sixteen);
  EXPECT(stored[0] == 0 && stored[32] == 31 && stored[37] == 3 && stored[49] == 0 && stored[64] == 7);
}

void arithmetic() {
  const Floats x = Floats::of([](int i) { return i - 4; });
  EXPECT(Floats::from(_mm512_add_ps(x, x)).at[0] == -8 && Floats::from(_mm512_mul_ps(x, x)).at[1] == 9);
  EXPECT(Ints::from(_mm512_castps_si512(_mm512_set1_ps(1))).at[3] == 0x3f800000);
  EXPECT(_mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32(0x40000000))) == 2);
  EXPECT(Ints::from(_mm512_setzero_si512()).at[15] == 0);
  EXPECT(Floats::from(_mm512_max_ps(x, _mm512_setzero_ps())).at[3] == 0 &&
         Floats::from(_mm512_max_ps(x, _mm512_setzero_ps())).at[9] == 5);
  EXPECT(std::isnan(Floats::from(_mm512_max_ps(_mm512_set1_ps(1), _mm512_set1_ps(kNaN))).at[0]));
  EXPECT(Floats::from(_mm512_max_ps(_mm512_set1_ps(kNaN), _mm512_set1_ps(1))).at[0] == 1);
  EXPECT(Floats::from(_mm512_abs_ps(x)).at[0] == 4 && bits(Floats::from(_mm512_abs_ps(_mm512_set1_ps(-0.0f))).at[1]) == 0);
  EXPECT(bits(_mm512_cvtss_f32(_mm512_set1_ps(-0.0f))) == 0x80000000);
  // (1 + 2^-12)^2 - 1 = 2^-11 + 2^-24 when rounded once; a rounded square has lost the 2^-24.
  const float near_one = 1 + 0x1p-12f;
  EXPECT(_mm512_cvtss_f32(_mm512_fmadd_ps(_mm512_set1_ps(near_one), _mm512_set1_ps(near_one), _mm512_set1_ps(-1))) ==
         0x1p-11f + 0x1p-24f);
  EXPECT(Floats::from(_mm512_sub_ps(x, _mm512_set1_ps(1))).at[0] == -5);
  EXPECT(_mm512_reduce_add_ps(x) == 56 && _mm512_reduce_max_ps(x) == 11);
  // Halves, quarters, then 0 + 2 and 1 + 3: the order of additions decides whether 2^24 and 1 meet.
  EXPECT(_mm512_reduce_add_ps(Floats::of([](int i) { return i == 0 ? 0x1p24f : i == 1 || i == 3 ? 1.0f : 0.0f; })) ==
         0x1p24f + 2);
  EXPECT(_mm512_reduce_max_epi32(Ints::of([](int i) { return i == 9 ? -2 : -3 - i; })) == -2);
  EXPECT(_mm512_reduce_add_epi32(Ints::of([](int i) { return i == 0 ? INT32_MAX : i == 1; })) == INT32_MIN);
  EXPECT(Ints::from(_mm512_sub_epi32(_mm512_set1_epi32(INT32_MIN), _mm512_set1_epi32(1))).at[5] == INT32_MAX);
  EXPECT(Ints::from(_mm512_add_epi32(_mm512_set1_epi32(7), _mm512_set1_epi32(-9))).at[5] == -2);
  EXPECT(Ints::from(_mm512_add_epi8(_mm512_set1_epi32(0x01ff7f80), _mm512_set1_epi32(0x02010180))).at[7] ==
         0x03008000);
  const __m512i high = _mm512_set1_epi32(int(0x80010003));
  EXPECT(Ints::from(_mm512_mullo_epi32(high, _mm512_set1_epi32(-2))).at[11] == int(0xfffdfffa));
  EXPECT(Ints::from(_mm512_mullo_epi16(high, _mm512_set1_epi32(0x0002ffff))).at[11] == 0x0002fffd);
  EXPECT(Ints::from(_mm512_slli_epi32(high, 1)).at[0] == 0x00020006);
  EXPECT(Ints::from(_mm512_srli_epi32(high, 1)).at[0] == 0x40008001);
  EXPECT(Ints::from(_mm512_srli_epi16(high, 1)).at[0] == 0x40000001);
  EXPECT(Ints::from(_mm512_srli_epi32(high, 32)).at[0] == 0);
  EXPECT(Ints::from(_mm512_and_si512(high, _mm512_set1_epi32(0xffff))).at[0] == 3);
  EXPECT(Ints::from(_mm512_or_si512(high, _mm512_set1_epi32(0x10))).at[0] == int(0x80010013));
  EXPECT(Ints::from(_mm512_xor_si512(high, _mm512_set1_epi32(0x11))).at[0] == int(0x80010012));
  EXPECT(Ints::from(_mm512_max_epi32(high, _mm512_set1_epi32(-1))).at[0] == -1);
  EXPECT(Ints::from(_mm512_srai_epi32(high, 16)).at[0] == -32767 && Ints::from(_mm512_srai_epi32(high, 40)).at[0] == -1);
  EXPECT(Ints::from(_mm512_srli_epi64(high, 28)).at[0] == 0x00100038 && Ints::from(_mm512_srli_epi64(high, 28)).at[1] == 8);
}

void masks() {
  const Floats x = Floats::of([](int i) { return i == 2 ? kNaN : i - 4.0f; });
  EXPECT(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ) == 0xfff0);
  EXPECT(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LE_OQ) == 0x001b);
  const Ints ints = Ints::of([](int i) { return i % 3 - 1; });
  EXPECT(_mm512_movepi32_mask(ints) == 0x9249);
  EXPECT(_mm512_test_epi32_mask(ints, _mm512_set1_epi32(2)) == 0x9249);
  const Bytes bytes = Bytes::of([](int i) { return i; });
  EXPECT(_mm512_test_epi8_mask(bytes, _mm512_set1_epi8(1)) == 0xaaaaaaaaaaaaaaaa);
  EXPECT(_mm512_test_epi8_mask(bytes, _mm512_set1_epi8(32)) == 0xffffffff00000000);
  const Words blended =
      Words::from(_mm512_mask_blend_epi16(0x80000002, _mm512_set1_epi32(7), _mm512_set1_epi32(0x90009)));
  EXPECT(blended.at[0] == 7 && blended.at[1] == 9 && blended.at[2] == 7 && blended.at[31] == 9);
  const Ints kept = Ints::from(_mm512_maskz_mov_epi32(0x8001, _mm512_set1_epi32(9)));
  EXPECT(kept.at[0] == 9 && kept.at[1] == 0 && kept.at[15] == 9);
  const Floats floats = Floats::from(_mm512_mask_mov_ps(_mm512_set1_ps(1), 2, _mm512_set1_ps(-0.0f)));
  EXPECT(floats.at[0] == 1 && bits(floats.at[1]) == 0x80000000);
  const Floats together = Floats::from(_mm512_maskz_compress_ps(0x8012, Floats::of([](int i) { return i + 1.0f; })));
  EXPECT(together.at[0] == 2 && together.at[1] == 5 && together.at[2] == 16 && together.at[3] == 0);
  const Ints added = Ints::from(_mm512_mask_add_epi32(_mm512_set1_epi32(7), 2, _mm512_set1_epi32(3), _mm512_set1_epi32(2)));
  EXPECT(added.at[0] == 7 && added.at[1] == 5);
  const Bytes index = Bytes::of([](int i) { return i == 5 ? 0x80 : 15 - i % 16; });
  const Bytes looked_up = Bytes::from(_mm512_mask_shuffle_epi8(_mm512_set1_epi8(99), 0x8000000000000021, bytes, index));
  EXPECT(looked_up.at[0] == 15 && looked_up.at[1] == 99 && looked_up.at[5] == 0 && looked_up.at[63] == 48);
}

void conversions() {
  EXPECT(Ints::from(_mm512_cvtepu8_epi32(_mm_setr_epi32(0x8001, 0, 0, int(0xff000000)))).at[1] == 128);
  EXPECT(Ints::from(_mm512_cvtepu8_epi32(_mm_setr_epi32(0x8001, 0, 0, int(0xff000000)))).at[15] == 255);
  const Bytes low_bytes = Bytes::from(_mm512_cvtepi64_epi8(Bytes::of([](int i) { return i; })));
  EXPECT(low_bytes.at[0] == 0 && low_bytes.at[1] == 8 && low_bytes.at[7] == 56 && low_bytes.at[8] == 0);
  const Floats ties = Floats::of([](int i) {
    const float values[] = {0.5f, 1.5f, -0.5f, -2.5f, 2147483648.0f, -2147483648.0f, kNaN, -kInf};
    return values[i % 8];
  });
  const Ints ints = Ints::from(_mm512_cvtps_epi32(ties));
  EXPECT(ints.at[0] == 0 && ints.at[1] == 2 && ints.at[2] == 0 && ints.at[3] == -2);
  EXPECT(ints.at[4] == INT32_MIN && ints.at[5] == INT32_MIN && ints.at[6] == INT32_MIN && ints.at[7] == INT32_MIN);
  EXPECT(_mm512_cvtss_f32(_mm512_cvtepi32_ps(_mm512_set1_epi32((1 << 24) + 1))) == 0x1p24f);
  EXPECT(_mm512_cvtss_f32(_mm512_cvtepi32_ps(_mm512_set1_epi32(-3))) == -3);
  const Words halves = Words::of([](int i) {
    const uint16_t values[] = {0x3c00, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfc00, 0x7d01, 0x8000};
    return values[i % 8];
  });
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves.at));
  const Floats wide = Floats::from(_mm512_cvtph_ps(half));
  EXPECT(wide.at[0] == 1 && wide.at[1] == -0x1p-24f && wide.at[2] == 1023 * 0x1p-24f && wide.at[3] == 0x1p-14f);
  EXPECT(wide.at[4] == 65504 && wide.at[5] == -kInf && bits(wide.at[6]) == 0x7fe02000 && bits(wide.at[7]) == 0x80000000);
  const __m256 few = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves.at)));
  for (int i = 0; i < 8; ++i) EXPECT(few[i] == wide.at[i] || i == 6);
  const __m128i back = _mm256_cvtps_ph(_mm256_loadu_ps(wide.at), 0);
  EXPECT(std::memcmp(&back, halves.at, 12) == 0);
  const __m512d doubles = _mm512_cvtps_pd(__m256{0.5f, 0, 0, 0, 0, 0, 0, -0x1.8p-126f});
  EXPECT(doubles[0] == 0.5 && doubles[1] == 0 && doubles[7] == -0x1.8p-126);
  const Floats some = Floats::from(_mm512_maskz_cvtph_ps(0x0001, half));
  EXPECT(some.at[0] == 1 && bits(some.at[1]) == 0 && bits(some.at[6]) == 0);
  EXPECT(Ints::from(_mm512_cvtepu16_epi32(half)).at[5] == 0xfc00);
  const Ints many = Ints::of([](int i) { return i == 0 ? 300 : i == 1 ? -300 : i; });
  EXPECT(Bytes::from(_mm512_cvtepi32_epi8(many)).at[0] == 44 && Bytes::from(_mm512_cvtepi32_epi8(many)).at[1] == 212);
  EXPECT(Bytes::from(_mm512_cvtsepi32_epi8(many)).at[0] == 127 && Bytes::from(_mm512_cvtsepi32_epi8(many)).at[1] == 128);
  EXPECT(Bytes::from(_mm512_cvtsepi32_epi8(many)).at[15] == 15);
}

void to_bf16() {
  const Floats x = Floats::of([](int i) {
    const float values[] = {1.0f, 1 + 0x1p-8f, 1 + 3 * 0x1p-8f, 1 + 0x1p-8f + 0x1p-20f, -0x1p-130f, kInf, 3.4e38f, 0x1p-126f};
    return values[i % 8];
  });
  const uint16_t want[] = {0x3f80, 0x3f80, 0x3f82, 0x3f81, 0x8000, 0x7f80, 0x7f80, 0x0080};
  const Words one = Words::from(_mm512_cvtneps_pbh(x));
  const Words two = Words::from(_mm512_cvtne2ps_pbh(x, _mm512_set1_ps(2)));
  for (int i = 0; i < 16; ++i) EXPECT(one.at[i] == want[i % 8] && two.at[16 + i] == want[i % 8] && two.at[i] == 0x4000);
  EXPECT(_mm512_fpclass_ps_mask(x, 0x20) == 0x1010);
  EXPECT((Words::from(_mm512_cvtneps_pbh(_mm512_set1_ps(kNaN))).at[0] & 0x7fc0) == 0x7fc0);
}

void shuffles() {
  const Bytes a = Bytes::of([](int i) { return i; }), b = Bytes::of([](int i) { return 64 + i; });
  EXPECT(Bytes::from(_mm512_unpacklo_epi8(a, b)).at[17] == 80 && Bytes::from(_mm512_unpackhi_epi8(a, b)).at[62] == 63);
  EXPECT(Bytes::from(_mm512_unpacklo_epi16(a, b)).at[3] == 65 && Bytes::from(_mm512_unpackhi_epi16(a, b)).at[20] == 26);
  EXPECT(Bytes::from(_mm512_unpacklo_epi32(a, b)).at[4] == 64 && Bytes::from(_mm512_unpackhi_epi32(a, b)).at[63] == 127);
  EXPECT(Bytes::from(_mm512_unpacklo_epi64(a, b)).at[24] == 80 && Bytes::from(_mm512_unpackhi_epi64(a, b)).at[0] == 8);
  const Ints wide = Ints::of([](int i) { return i == 5 ? 70000 : i == 6 ? -70000 : 40000 * (i % 2); });
  const Words held = Words::from(_mm512_packs_epi32(_mm512_set1_epi32(-3), wide));
  EXPECT(held.at[8] == 0xfffd && held.at[11] == 0xfffd && held.at[12] == 0 && held.at[13] == 0x7fff);
  EXPECT(held.at[14] == 0x8000 && held.at[15] == 0x7fff && held.at[31] == 0x7fff);
  const Words narrow = Words::of([](int i) { return i == 0 ? 300 : i == 1 ? -300 : i; });
  const Bytes as_signed = Bytes::from(_mm512_packs_epi16(narrow, _mm512_set1_epi32(0x00c8ffff)));
  EXPECT(as_signed.at[0] == 127 && as_signed.at[1] == 128 && as_signed.at[7] == 7 && as_signed.at[8] == 255 &&
         as_signed.at[9] == 127 && as_signed.at[16] == 8);
  const Bytes index = Bytes::of([](int i) { return i % 3 == 0 ? 0x80 | i : 0x10 | (15 - i % 16); });
  const Bytes looked_up = Bytes::from(_mm512_shuffle_epi8(a, index));
  EXPECT(looked_up.at[0] == 0 && looked_up.at[1] == 14 && looked_up.at[17] == 30 && looked_up.at[62] == 49);
  const Words high = Words::of([](int i) { return i % 2 == 0 ? 0x8000 : 5; }), low = Words::of([](int) { return 7; });
  const Words larger = Words::from(_mm512_max_epu16(high, low));
  EXPECT(larger.at[0] == 0x8000 && larger.at[31] == 7);
  EXPECT(Words::from(_mm512_set1_epi16(-2)).at[31] == 0xfffe);
  EXPECT(Ints::from(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)).at[9] == 9);
  const Ints x = Ints::of([](int i) { return i / 4; }), y = Ints::of([](int i) { return 10 + i / 4; });
  const Ints mixed = Ints::from(_mm512_shuffle_i32x4(x, y, 0x8d));  // 1, 3 of x, then 0, 2 of y
  EXPECT(mixed.at[0] == 1 && mixed.at[7] == 3 && mixed.at[8] == 10 && mixed.at[15] == 12);
  const Ints numbers = Ints::of([](int i) { return i; });
  EXPECT(Ints::from(_mm512_shuffle_epi32(numbers, _MM_PERM_ENUM(0x1b))).at[4] == 7);
  const Ints backwards = Ints::of([](int i) { return 0x40 + 15 - i + 16 * (i % 2); });
  EXPECT(Ints::from(_mm512_permutexvar_epi32(backwards, numbers)).at[1] == 14);
  EXPECT(Floats::from(_mm512_permutexvar_ps(backwards, Floats::of([](int i) { return i; }))).at[0] == 15);
  alignas(16) uint8_t small[16] = {15, 0x80, 3}, taken[16], bytes[17];
  for (int i = 0; i < 17; ++i) bytes[i] = uint8_t(i);
  const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(small));
  const __m128i sixteen = _mm_setr_epi32(0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(taken), _mm_shuffle_epi8(sixteen, order));
  EXPECT(taken[0] == 15 && taken[1] == 0 && taken[2] == 3 && taken[3] == 0);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(taken), _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 1)));
  EXPECT(taken[0] == 1 && taken[15] == 16);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(taken), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(small)));
  EXPECT(taken[0] == 15 && taken[2] == 3 && taken[14] == 15);
  const __m128i codes = _mm_setr_epi8(-1, 2, -128, 127, 0x35, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, -15);
  float eight[8];
  _mm256_storeu_ps(eight, _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
                                                      _mm256_set1_ps(0.5f)), _mm256_set1_ps(1)));
  EXPECT(eight[0] == 0.5f && eight[1] == 2 && eight[2] == -63 && eight[3] == 64.5f && eight[7] == 4.5f);
  _mm256_storeu_ps(eight, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes)));
  EXPECT(eight[0] == 255 && eight[2] == 128 && eight[3] == 127);
  alignas(64) Floats aligned;
  _mm512_store_ps(aligned.at, _mm512_load_ps(Floats::of([](int i) { return i; }).at));
  EXPECT(aligned.at[15] == 15);
}

void dots() {
  const Bytes a = Bytes::of([](int) { return 255; });
  const Bytes b = Bytes::of([](int i) { return i < 4 ? 0x80 : i % 4 == 0 ? 127 : 0xff; });
  const Ints sums = Ints::from(_mm512_dpbusd_epi32(_mm512_set1_epi32(1), a, b));
  EXPECT(sums.at[0] == 1 - 4 * 255 * 128 && sums.at[1] == 1 + 255 * 127 - 3 * 255);
  EXPECT(Ints::from(_mm512_dpbusd_epi32(_mm512_set1_epi32(INT32_MIN), a, b)).at[0] == INT32_MAX - 130559);  // wraps

  const auto product = [](float sum, uint16_t low, uint16_t high, uint16_t with_low, uint16_t with_high) {
    const Words x = Words::of([&](int i) { return i % 2 == 0 ? low : high; });
    const Words y = Words::of([&](int i) { return i % 2 == 0 ? with_low : with_high; });
    return _mm512_cvtss_f32(_mm512_dpbf16_ps(_mm512_set1_ps(sum), pairs(x), pairs(y)));
  };
  EXPECT(product(1, 0x4000, 0x4040, 0x4080, 0xbf80) == 6);  // 1 + 2 * 4 + 3 * -1
  // The upper product comes first: (2^24 + 1) - 2^24 loses the 1, which the other order would keep.
  EXPECT(product(0x1p24f, 0xcb80, 0x3f80, 0x3f80, 0x3f80) == 0);
  EXPECT(product(0x1p24f, 0x3f80, 0xcb80, 0x3f80, 0x3f80) == 1);
  EXPECT(bits(product(0, 0x0001, 0, 0x7f00, 0)) == 0);          // a subnormal factor is zero
  EXPECT(bits(product(0x1p-130f, 0, 0, 0x3f80, 0x3f80)) == 0);  // and so is a subnormal sum
  EXPECT(bits(product(0, 0x0080, 0, 0x3f00, 0)) == 0);          // 2^-126 / 2
  EXPECT(product(0, 0x0080, 0, 0x3f80, 0) == 0x1p-126f);
}

}  // namespace

void check_tiles(void (*expect)(bool, const char*, int));
void misuse_tiles();

// Makes the mistake `how`, which causes a fault on hardware.
void misuse(const char* how) {
  alignas(64) const uint8_t bytes[128] = {};
  if (std::strcmp(how, "aligned load") == 0) failures = Bytes::from(_mm512_load_si512(bytes + 1)).at[0];
  else misuse_tiles();
}

int main(int count, char** arguments) {
  if (count > 1) misuse(arguments[1]);
  memory();
  arithmetic();
  masks();
  conversions();
  to_bf16();
  shuffles();
  dots();
  check_tiles(expect);
  if (failures == 0) std::printf("every value as expected\n");
  return failures;
}
