// Choice of the kernels' instruction set (level), once at load, by CPUID.
#pragma once

namespace octavo {

// Levels in ascending order: a CPU that supports one supports all before it.
enum class Isa {
  generic,  // the architecture's baseline: runs everywhere, but slowly
  avx2,     // x86-64-v3: AVX2, FMA, F16C
  avx512,   // x86-64-v4 with AVX-512 BF16 and VNNI
  amx,      // avx512 with AMX tiles for bf16 and int8
};

// Returns the level in use. OCTAVO_CPU_ISA=generic|avx2|avx512|amx selects a level up to the CPU's own.
// Throws std::invalid_argument for a level that is unknown or not supported by this CPU.
Isa isa();

bool isa_supported(Isa level);
const char* isa_name(Isa level);

// Kinds of cores, which differ in the best way to prefetch data that a step reads once, but not in results.
enum class Core {
  zen3,   // AMD up to Zen 3: like zen4 unless measured separately
  zen4,   // prefetches into L2; non-temporal ones make attention over pages up to 1.6 times slower
  zen5,   // later AMD: non-temporal prefetches past L2, which then keeps other data between steps
  other,  // prefetches into L2: on Intel's CPUs, non-temporal prefetches reach a third of DRAM's rate, and
          // prefetches into L1 take the few fill buffers from loads
};
extern const Core kCore;

// Whether bf16 pairs of several rows are multiplied by two FMAs instead of one VDPBF16PS. Results are
// bit-identical. On Intel's CPUs a VDPBF16PS takes as long as four FMAs (on a Granite Rapids 0.6 ns; an FMA
// takes 0.13 ns). On AMD's Zen 4 and Zen 5 it takes less time than two FMAs.
extern const bool kSplitsPairs;

}  // namespace octavo

// Calls the function compiled for the level in use; the level amx uses avx512's.
#if defined(__x86_64__)
#define OCTAVO_AT_LEVEL(function, ...)                  \
  (isa() >= Isa::avx512 ? avx512::function(__VA_ARGS__) \
   : isa() == Isa::avx2 ? avx2::function(__VA_ARGS__)   \
                        : generic::function(__VA_ARGS__))
#else
#define OCTAVO_AT_LEVEL(function, ...) generic::function(__VA_ARGS__)
#endif
