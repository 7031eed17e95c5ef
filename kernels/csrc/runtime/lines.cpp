#include "runtime/lines.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {
namespace {

// (Not aligned_alloc: it needs a size that is a multiple of the alignment, which huge pages would make too
// large.)
Lines aligned(std::size_t alignment, std::size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, (bytes + kLine - 1) / kLine * kLine) != 0) throw std::bad_alloc();
  return Lines(static_cast<char*>(memory));
}

}  // namespace

Lines allocate_lines(std::size_t bytes) {
#if defined(__linux__)
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  constexpr std::size_t kSmallest = std::size_t{256} << 10;
  if (bytes >= kSmallest) {
    bytes = std::max(bytes, kHugePage);
    Lines lines = aligned(kHugePage, bytes);
    madvise(lines.get(), bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // only advice: errors do not matter
    return lines;
  }
#endif
  return aligned(kLine, std::max(bytes, kLine));
}

}  // namespace octavo
