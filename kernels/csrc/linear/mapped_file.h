// Arrays in a memory-mapped file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// A file that is mapped while this object or one of its arrays exists; it must not be truncated in that time.
// Throws std::runtime_error with the reason if a file cannot be mapped.
class MappedFile : public std::enable_shared_from_this<MappedFile> {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // Returns the bytes at `offset` as a read-only array; its pages leave memory when the array is freed.
  // Throws std::invalid_argument unless the array is inside the file and not at its start.
  mx::array view(int64_t offset, const mx::Shape& shape, mx::Dtype dtype);

 private:
  std::string path_;
  char* data_ = nullptr;
  std::size_t size_ = 0;
};

// Returns the evaluated array, or a contiguous copy if it is not contiguous. (mx::contiguous would also copy
// arrays inside a mapped file, because their buffer looks much larger than they are.)
mx::array evaluated(const mx::array& array);

// Copies the values to newly allocated memory.
mx::array copy_of(const mx::array& array);

}  // namespace octavo
