// Dot products of AVX-512: VNNI and bf16.
#pragma once

#include "emulated_avx512.h"

// VPDPBUSD: each lane adds four products of an unsigned byte of a and a signed byte of b, modulo
// 2^32 (nothing saturates).
OCTAVO_EMULATED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  typedef x86_emulator::Lanes<uint32_t> Unsigned;
  typedef x86_emulator::Lanes<int32_t> Signed;
  Unsigned total = (Unsigned)sum;
  for (int byte = 0; byte < 4; ++byte) {
    const Unsigned x = (Unsigned)a >> (8 * byte) & 255u;
    const Signed y = (Signed)((Unsigned)b << (24 - 8 * byte)) >> 24;
    total += x * (Unsigned)y;
  }
  return (__m512i)total;
}

// VDPBF16PS: the upper product of each pair is accumulated first, then the lower one, each by a fused
// multiply-add that rounds to nearest even. Subnormal operands and results are zero.
OCTAVO_EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  uint32_t x[16], y[16];
  float total[16];
  std::memcpy(x, &a, 64);
  std::memcpy(y, &b, 64);
  std::memcpy(total, &sum, 64);
  for (int i = 0; i < 16; ++i) {
    using namespace x86_emulator;
    total[i] = flushed_fma(upper_bf16(x[i]), upper_bf16(y[i]), total[i]);
    total[i] = flushed_fma(lower_bf16(x[i]), lower_bf16(y[i]), total[i]);
  }
  return x86_emulator::read<__m512>(total);
}
