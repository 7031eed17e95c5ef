#include "runtime/lines.h"

#include <algorithm>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {
namespace {

Lines aligned(std::size_t alignment, std::size_t bytes) {
  Lines lines(static_cast<char*>(std::aligned_alloc(alignment, (bytes + kLine - 1) / kLine * kLine)));
  if (lines == nullptr) throw std::bad_alloc();
  return lines;
}

}  // namespace

Lines allocate_lines(std::size_t bytes) {
#if defined(__linux__)
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  constexpr std::size_t kSmallest = std::size_t{256} << 10;
  if (bytes >= kSmallest) {
    bytes = std::max(bytes, kHugePage);
    Lines lines = aligned(kHugePage, bytes);
    madvise(lines.get(), bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // advice: may be ignored
    return lines;
  }
#endif
  return aligned(kLine, std::max(bytes, kLine));
}

}  // namespace octavo
