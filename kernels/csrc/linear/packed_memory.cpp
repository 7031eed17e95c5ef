// Memory of packed weights.
#include <cstdlib>
#include <mutex>
#include <new>

#include "linear/packed.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace

#if defined(__linux__)

// New pages from the system are zero, and may be huge pages from the start.
Buffer::Buffer(std::size_t bytes) : size_(bytes), mapped_(bytes + kHugePage) {
  void* start = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) throw std::bad_alloc();
  mapping_ = start;
  const std::size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(start) + alignment - 1) & ~(alignment - 1));
  madvise(data_, bytes, MADV_HUGEPAGE);  // only advice, so errors do not matter
}

Buffer::~Buffer() { munmap(mapping_, mapped_); }

#else

Buffer::Buffer(std::size_t bytes) : size_(bytes), mapped_((bytes + 64) / 64 * 64) {
  mapping_ = std::aligned_alloc(64, mapped_);
  if (mapping_ == nullptr) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(mapping_);
  std::memset(data_, 0, mapped_);
}

Buffer::~Buffer() { std::free(mapping_); }

#endif

Slice::Slice(std::size_t bytes) : size_(bytes) {
  constexpr std::size_t kShared = 16 * kHugePage;
  if (bytes > kShared / 4) {
    buffer_ = std::make_shared<const Buffer>(bytes);
    data_ = buffer_->data();
    return;
  }
  static std::mutex mutex;
  static std::weak_ptr<const Buffer> latest;
  static std::size_t used;  // used bytes of `latest`
  const std::lock_guard<std::mutex> guard(mutex);
  buffer_ = latest.lock();
  if (buffer_ == nullptr || used + bytes > kShared) {
    buffer_ = std::make_shared<const Buffer>(kShared);
    latest = buffer_;
    used = 0;
  }
  data_ = buffer_->data() + used;
  used += (bytes + 63) / 64 * 64;
}

}  // namespace octavo
