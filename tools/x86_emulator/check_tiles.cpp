// Checks AMX as check.cpp checks AVX-512. Empty if AMX is not compiled (OCTAVO_CHECK_TILES=0).
#if OCTAVO_CHECK_TILES

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if !defined(OCTAVO_EMULATED)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define EXPECT(...) expect((__VA_ARGS__), #__VA_ARGS__, __LINE__)

namespace {

// As in kernels/csrc/linear/amx_tiles.h, because intrinsics do not tell the compiler what they read.
void finish_stores() { __asm__ volatile("" ::: "memory"); }

// Tile 0: 3 rows of 5 columns; tile 1: 3 rows of 2 groups of four bytes; tile 2: 2 rows of 5 groups.
void configure() {
  uint8_t config[64] = {1};
  const uint16_t row_bytes[] = {20, 8, 20};
  std::memcpy(config + 16, row_bytes, sizeof row_bytes);
  config[48] = 3, config[49] = 3, config[50] = 2;
  finish_stores();
  _tile_loadconfig(config);
}

uint16_t bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return uint16_t(bits >> 16);
}

void load_bf16(const float (&a)[3][4], const float (&b)[2][10]) {
  uint16_t x[3][4], y[2][10];
  for (int m = 0; m < 3; ++m)
    for (int k = 0; k < 4; ++k) x[m][k] = bf16(a[m][k]);
  for (int k = 0; k < 2; ++k)
    for (int n = 0; n < 10; ++n) y[k][n] = bf16(b[k][n]);
  finish_stores();
  _tile_loadd(1, x, sizeof x[0]);
  _tile_loadd(2, y, sizeof y[0]);
}

template <class X, class Y>
void load_bytes(X a, Y b) {
  X x[3][8];
  Y y[2][20];
  for (auto& row : x)
    for (X& value : row) value = a;
  for (auto& row : y)
    for (Y& value : row) value = b;
  y[1][19] = 0;  // of column 4, the last byte of the second group
  finish_stores();
  _tile_loadd(1, x, sizeof x[0]);
  _tile_stream_loadd(2, y, sizeof y[0]);
}

}  // namespace

void check_tiles(void (*expect)(bool, const char*, int)) {
#if !defined(OCTAVO_EMULATED)
  EXPECT(syscall(SYS_arch_prctl, 0x1023, 18) == 0);  // asks Linux for the use of tiles (runtime/dispatch.cpp)
#endif
  configure();
  float c[3][7];
  const auto store = [&] {
    for (auto& row : c)
      for (float& value : row) value = -1;
    _tile_stored(0, c, sizeof c[0]);
  };
  // C[m][n] = 1 * (n + 1) + 2 * 10 + 3 * (n + 1) * 0.5 + 4 * m, in pairs (0, 1) and (2, 3) of k
  float a[3][4], b[2][10];
  for (int m = 0; m < 3; ++m) a[m][0] = 1, a[m][1] = 2, a[m][2] = 3, a[m][3] = 4 * float(m);
  for (int n = 0; n < 5; ++n)
    b[0][2 * n] = float(n + 1), b[0][2 * n + 1] = 10, b[1][2 * n] = float(n + 1) / 2, b[1][2 * n + 1] = 1;
  load_bf16(a, b);
  _tile_zero(0);
  _tile_dpbf16ps(0, 1, 2);
  store();
  EXPECT(c[0][0] == 22.5f && c[2][4] == 5 + 20 + 7.5f + 8 && c[1][5] == -1 && c[1][6] == -1);
  _tile_dpbf16ps(0, 1, 2);
  store();
  EXPECT(c[0][0] == 45);

  // Even and odd elements have separate sums: 2^24 - 2^24 and 1 + 1 give 2; a single sum would lose the ones.
  for (int m = 0; m < 3; ++m) a[m][0] = 0x1p24f, a[m][1] = 1, a[m][2] = -0x1p24f, a[m][3] = 1;
  for (auto& row : b)
    for (float& value : row) value = 1;
  load_bf16(a, b);
  _tile_zero(0);
  _tile_dpbf16ps(0, 1, 2);
  store();
  EXPECT(c[1][3] == 2);
  // The two sums are added first, then the tile: 2^24 + (1 + 1), not (2^24 + 1) + 1.
  for (int m = 0; m < 3; ++m) a[m][0] = 1, a[m][1] = 1, a[m][2] = 0, a[m][3] = 0x1p-130f;
  load_bf16(a, b);
  for (auto& row : c)
    for (float& value : row) value = 0x1p24f;
  _tile_loadd(0, c, sizeof c[0]);
  _tile_dpbf16ps(0, 1, 2);
  store();
  EXPECT(c[2][2] == 0x1p24f + 2);

  int32_t sums[3][5];
  _tile_zero(0);
  load_bytes<uint8_t, int8_t>(255, -128);
  _tile_dpbusd(0, 1, 2);
  load_bytes<int8_t, int8_t>(-128, -128);
  _tile_dpbssd(0, 1, 2);
  _tile_stored(0, sums, sizeof sums[0]);
  EXPECT(sums[0][0] == 8 * (128 - 255) * 128 && sums[2][4] == 7 * (128 - 255) * 128);
  _tile_zero(0);
  load_bytes<int8_t, uint8_t>(-128, 255);
  _tile_dpbsud(0, 1, 2);
  load_bytes<uint8_t, uint8_t>(255, 255);
  _tile_dpbuud(0, 1, 2);
  _tile_stored(0, sums, sizeof sums[0]);
  EXPECT(sums[1][1] == 8 * 255 * (255 - 128));
  _tile_release();
}

// Multiplies tiles whose shapes do not fit.
void misuse_tiles() {
  configure();
  _tile_dpbf16ps(0, 2, 1);
}

#else

void misuse_tiles() {}
void check_tiles(void (*)(bool, const char*, int)) {}

#endif
