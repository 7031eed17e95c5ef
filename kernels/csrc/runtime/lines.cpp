#include "runtime/lines.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kSmallestHuge = std::size_t{1} << 20;

std::size_t round_up(std::size_t bytes, std::size_t step) { return (bytes + step - 1) / step * step; }

}  // namespace

void* allocate_lines(std::size_t bytes) {
  const bool huge = bytes >= kSmallestHuge;
  if (huge) bytes = std::max(bytes, kHugePage);
  void* const data = std::aligned_alloc(huge ? kHugePage : kLine, round_up(std::max(bytes, kLine), kLine));
  if (data == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (huge) madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // advice: may be ignored
#endif
  return data;
}

}  // namespace octavo
