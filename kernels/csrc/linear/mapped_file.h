// Arrays that lie in a file, read when they are used.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "mlx/mlx.h"

namespace octavo {

namespace mx = mlx::core;

// A file in the process's address space, as long as it or one of its arrays lives. It must not be cut off
// meanwhile. std::runtime_error says why a file cannot be mapped.
class MappedFile : public std::enable_shared_from_this<MappedFile> {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  // The bytes from `offset` on as an array, which must not be written to. What was read of it leaves the
  // process's memory with the array. std::invalid_argument unless it lies in the file, not at its start.
  mx::array view(int64_t offset, const mx::Shape& shape, mx::Dtype dtype);

 private:
  std::string path_;
  char* data_ = nullptr;
  std::size_t size_ = 0;
};

// The array without gaps between its values: itself, if it has none. (mx::contiguous also copies where a
// buffer looks much larger than the array; in a file it takes the weights in front for that size.)
mx::array evaluated(const mx::array& array);

// The same values in memory of their own.
mx::array copy_of(const mx::array& array);

}  // namespace octavo
