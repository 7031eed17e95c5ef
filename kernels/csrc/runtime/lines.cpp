#include "runtime/lines.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {
namespace {

void* aligned(std::size_t alignment, std::size_t bytes) {
  void* const data = std::aligned_alloc(alignment, (bytes + kLine - 1) / kLine * kLine);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

}  // namespace

void* allocate_lines(std::size_t bytes) {
#if defined(__linux__)
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  constexpr std::size_t kSmallest = std::size_t{1} << 20;
  if (bytes >= kSmallest) {
    bytes = std::max(bytes, kHugePage);
    void* const data = aligned(kHugePage, bytes);
    madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // advice: may be ignored
    return data;
  }
#endif
  return aligned(kLine, std::max(bytes, kLine));
}

}  // namespace octavo
