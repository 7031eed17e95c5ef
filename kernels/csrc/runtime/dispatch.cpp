#include "runtime/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

constexpr Isa kLevels[] = {Isa::generic, Isa::avx2, Isa::avx512, Isa::amx};

#if defined(__x86_64__)

bool has_avx2() { return __builtin_cpu_supports("x86-64-v3"); }

#if defined(OCTAVO_EMULATE_AMX)
constexpr Isa kFastest = Isa::avx2;  // emulation is correct but slow, so it must be requested
#else
constexpr Isa kFastest = Isa::amx;
#endif

#if defined(OCTAVO_EMULATE_AVX512)

bool has_avx512() { return has_avx2(); }

#else

bool has_avx512() {
  return __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vnni");
}

#endif  // OCTAVO_EMULATE_AVX512

#if defined(OCTAVO_EMULATE_AMX)

bool has_amx() { return has_avx2(); }

#else

// Requests the permission to use AMX, which Linux requires because tile registers are 8 KiB of state per
// thread. The permission is valid for the whole process, including threads that are started later.
bool has_amx() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, asm/prctl.h
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  unsigned leaf = 7, subleaf = 0, ebx, edx;
  asm("cpuid" : "+a"(leaf), "=b"(ebx), "+c"(subleaf), "=d"(edx));
  const bool bf16 = edx & (1u << 22), tile = edx & (1u << 24), int8 = edx & (1u << 25);
  return bf16 && tile && int8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#endif  // OCTAVO_EMULATE_AMX

#else

constexpr Isa kFastest = Isa::generic;

#endif  // __x86_64__

Isa choose() {
  const char* asked = std::getenv("OCTAVO_CPU_ISA");
  if (asked == nullptr || *asked == '\0') {
    Isa best = Isa::generic;
    for (Isa level : kLevels)
      if (level <= kFastest && isa_supported(level)) best = level;
    return best;
  }
  for (Isa level : kLevels) {
    if (std::string(asked) != isa_name(level)) continue;
    if (isa_supported(level)) return level;
    throw std::invalid_argument("OCTAVO_CPU_ISA=" + std::string(asked) +
                                " is not supported by this CPU; unset it to let Octavo choose");
  }
  throw std::invalid_argument("OCTAVO_CPU_ISA must be one of generic, avx2, avx512, amx, got \"" +
                              std::string(asked) + "\"; unset it to let Octavo choose");
}

Core this_core() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_is("amd")) return Core::other;
  // CPU family: base plus extended family (AMD's manual, CPUID Fn0000_0001).
  unsigned leaf = 1, ebx, ecx = 0, edx;
  asm("cpuid" : "+a"(leaf), "=b"(ebx), "+c"(ecx), "=d"(edx));
  const unsigned family = ((leaf >> 8) & 0xf) + ((leaf >> 20) & 0xff);
  if (family >= 0x1a) return Core::zen5;
  return __builtin_cpu_supports("avx512f") ? Core::zen4 : Core::zen3;  // both have family 25
#else
  return Core::other;
#endif
}

#if defined(OCTAVO_EMULATE_AMX)
constexpr bool kEmulated = true;  // tests compare both kernels
#else
constexpr bool kEmulated = false;
#endif

}  // namespace

const Core kCore = this_core();
const bool kSplitsPairs = kEmulated || kCore == Core::other;

bool isa_supported(Isa level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (level) {
    case Isa::generic: return true;
    case Isa::avx2: return has_avx2();
    case Isa::avx512: return has_avx512();
    case Isa::amx: return has_avx512() && has_amx();
  }
#endif
  return level == Isa::generic;
}

const char* isa_name(Isa level) {
  switch (level) {
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::amx: return "amx";
    case Isa::generic: break;
  }
  return "generic";
}

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace octavo
