// The instruction set of kernels, chosen once at load by CPUID.
#pragma once

namespace octavo {

// Ascending: a CPU that supports a level supports every level before it.
enum class Isa {
  generic,  // the architecture's baseline: runs everywhere, but slowly
  avx2,     // x86-64-v3: AVX2, FMA, F16C
  avx512,   // x86-64-v4 with AVX-512 BF16 and VNNI
  amx,      // avx512 with AMX tiles for bf16 and int8
};

// Returns the level in use. OCTAVO_CPU_ISA=generic|avx2|avx512|amx selects a lower level than the CPU has.
// Throws std::invalid_argument for a level that is unknown or not supported by this CPU.
Isa isa();

bool isa_supported(Isa level);
const char* isa_name(Isa level);

// Kinds of cores, by the best way to prefetch memory that a step reads once. Results are bit-identical.
enum class Core {
  zen3,   // AMD, up to Zen 3; like zen4 unless measured separately
  zen4,   // into L2; non-temporal prefetches make attention over pages up to 1.6 times slower
  zen5,   // later AMD: non-temporal, past L2, which then keeps other data between steps
  other,  // into L2: with non-temporal prefetches Intel reads at a third of DRAM's rate; L1 prefetches share
          // the few fill buffers with loads
};
extern const Core kCore;

// Whether several rows multiply pairs of bf16 by two FMAs instead of VDPBF16PS. On Intel's CPUs one VDPBF16PS
// takes as long as four FMAs (0.6 and 0.13 ns on a Granite Rapids), on AMD's (Zen 4, Zen 5) less than two.
// Results are bit-identical.
extern const bool kSplitsPairs;

}  // namespace octavo

// Selects a function compiled for the level in use; AMX uses avx512's function.
#if defined(__x86_64__)
#define OCTAVO_AT_LEVEL(function, ...)                  \
  (isa() >= Isa::avx512 ? avx512::function(__VA_ARGS__) \
   : isa() == Isa::avx2 ? avx2::function(__VA_ARGS__)   \
                        : generic::function(__VA_ARGS__))
#else
#define OCTAVO_AT_LEVEL(function, ...) generic::function(__VA_ARGS__)
#endif
