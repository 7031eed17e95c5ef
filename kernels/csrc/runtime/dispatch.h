// The kernels' instruction set, chosen once, at load, by CPUID.
#pragma once

namespace octavo {

// Ascending: a CPU that supports a level supports every level before it.
enum class Isa {
  generic,  // the architecture's baseline: correct everywhere, fast nowhere
  avx2,     // x86-64-v3: AVX2, FMA, F16C
  avx512,   // x86-64-v4 with AVX-512 BF16 and VNNI
  amx,      // avx512 with AMX tiles for bf16 and int8
};

// The level in use. OCTAVO_CPU_ISA=generic|avx2|avx512|amx selects a lower one than the CPU has. Throws
// std::invalid_argument for an unknown level, or one that this CPU does not support.
Isa isa();

bool isa_supported(Isa level);
const char* isa_name(Isa level);

// Cores by their best way to prefetch memory that a step reads once. Results have the same bits.
enum class Core {
  zen3,   // AMD, up to Zen 3; like zen4 unless measured separately
  zen4,   // into L2; non-temporal prefetches make attention over pages up to 1.6 times slower
  zen5,   // later AMD: non-temporal, past L2, which then keeps the host's data between steps
  other,  // into L2: with non-temporal ones Intel reads at a third of DRAM's rate, and L1 ones would share
          // its few fill buffers with loads
};
extern const Core kCore;

// Whether several rows multiply pairs of bf16 by two fused multiplications. On Intel's CPUs VDPBF16PS takes
// as long as four of these (0.6 and 0.13 ns on a Granite Rapids), on AMD's (Zen 4, Zen 5) less than two. Bits
// are the same.
extern const bool kSplitsPairs;

}  // namespace octavo

// A function as compiled for the level in use; AMX uses avx512's.
#if defined(__x86_64__)
#define OCTAVO_AT_LEVEL(function, ...)                  \
  (isa() >= Isa::avx512 ? avx512::function(__VA_ARGS__) \
   : isa() == Isa::avx2 ? avx2::function(__VA_ARGS__)   \
                        : generic::function(__VA_ARGS__))
#else
#define OCTAVO_AT_LEVEL(function, ...) generic::function(__VA_ARGS__)
#endif
