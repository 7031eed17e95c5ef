// Which instruction set the kernels use: chosen once, at load, by CPUID.
#pragma once

namespace octavo {

// Ascending: a CPU that runs a level runs every level before it.
enum class Isa {
  generic,  // the architecture's baseline: right everywhere, fast nowhere
  avx2,     // x86-64-v3: AVX2, FMA, F16C
  avx512,   // x86-64-v4 with AVX-512 BF16 and VNNI
  amx,      // avx512 with AMX tiles for bf16 and int8
};

// The level in use. OCTAVO_CPU_ISA=generic|avx2|avx512|amx asks for a lower one than the CPU has.
// Throws std::invalid_argument if that variable names no level, or one this CPU cannot run.
Isa isa();

bool isa_supported(Isa level);
const char* isa_name(Isa level);

// Cores by how memory that a step reads once is prefetched. Results are the same bits.
enum class Core {
  zen3,   // AMD's, up to Zen 3: as a Zen 4, where that was not measured alone
  zen4,   // into L2; non-temporally, attention over pages takes up to 1.6 times as long
  zen5,   // AMD's later ones: non-temporally, past L2, which then keeps what the host needs between steps
  other,  // into L2: non-temporally, Intel's read a third of DRAM's rate, and into L1 prefetches would share
          // its few fill buffers with loads
};
extern const Core kCore;

// Whether several rows multiply pairs of bf16 by two fused multiplications: on Intel's CPUs VDPBF16PS takes
// as long as four (0.6 and 0.13 ns on a Granite Rapids), on AMD's (Zen 4, Zen 5) less than two. Bits are the
// same.
extern const bool kSplitsPairs;

}  // namespace octavo

// A function as it is compiled for the level in use; AMX has none of its own of these.
#if defined(__x86_64__)
#define OCTAVO_AT_LEVEL(function, ...)                  \
  (isa() >= Isa::avx512 ? avx512::function(__VA_ARGS__) \
   : isa() == Isa::avx2 ? avx2::function(__VA_ARGS__)   \
                        : generic::function(__VA_ARGS__))
#else
#define OCTAVO_AT_LEVEL(function, ...) generic::function(__VA_ARGS__)
#endif
