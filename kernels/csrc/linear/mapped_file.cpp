#include "linear/mapped_file.h"

#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "program/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

// Tells the system that it may drop these pages of a mapped file from memory.
void forget(char* data, std::size_t size) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + size) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status{};
  if (file < 0 || fstat(file, &status) != 0 || status.st_size == 0) {
    const std::string reason = file < 0 || errno != 0 ? std::strerror(errno) : "it is empty";
    if (file >= 0) close(file);
    throw std::runtime_error(path + " cannot be mapped: " + reason);
  }
  size_ = static_cast<std::size_t>(status.st_size);
  void* const start = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
  const int error = errno;
  close(file);
  if (start == MAP_FAILED) throw std::runtime_error(path + " cannot be mapped: " + std::strerror(error));
  data_ = static_cast<char*>(start);
}

MappedFile::~MappedFile() { munmap(data_, size_); }

mx::array MappedFile::view(int64_t offset, const mx::Shape& shape, mx::Dtype dtype) {
  std::size_t bytes = mx::size_of(dtype);
  for (const int size : shape) bytes *= size;
  require(offset >= static_cast<int64_t>(sizeof(std::size_t)) && static_cast<std::size_t>(offset) <= size_ &&
              bytes <= size_ - offset,
          "an array of " + std::to_string(bytes) + " bytes at " + std::to_string(offset) + " is not inside " +
              path_ + ", which has " + std::to_string(size_));
  // MLX stores a size before the data of its own buffers. This array has no such size, and nothing may read
  // it: see evaluated().
  char* const start = data_ + offset;
  mx::allocator::Buffer probe(start);
  const ptrdiff_t front = static_cast<char*>(probe.raw_ptr()) - start;
  mx::allocator::Data data(
      mx::allocator::Buffer(start - front),
      [file = shared_from_this(), start, bytes](mx::allocator::Buffer) { forget(start, bytes); });
  return mx::array(std::move(data), shape, dtype);
}

mx::array evaluated(const mx::array& array) {
  mx::array whole = array;
  whole.eval();
  if (whole.flags().row_contiguous) return whole;
  mx::array plain = mx::contiguous(whole);
  plain.eval();
  return plain;
}

mx::array copy_of(const mx::array& array) {
  const mx::array plain = evaluated(array);
  mx::array copy(plain.shape(), plain.dtype(), nullptr, {});
  copy.set_data(mx::allocator::malloc(copy.nbytes()));
  copy.set_status(mx::array::Status::available);
  std::memcpy(copy.data<char>(), plain.data<char>(), plain.nbytes());
  return copy;
}

void bind_mapped_file(nb::module_& m) {
  nb::class_<MappedFile>(m, "MappedFile", "A memory-mapped file, whose arrays are read when they are used.")
      .def(nb::new_([](const std::string& path) { return std::make_shared<MappedFile>(path); }), "path"_a,
           "Map a file. Raises RuntimeError with the reason if that fails.")
      .def(
          "view",
          [](MappedFile& self, int64_t offset, const std::vector<int>& shape, mx::Dtype dtype) {
            return self.view(offset, mx::Shape(shape.begin(), shape.end()), dtype);
          },
          "offset"_a, "shape"_a, "dtype"_a,
          "Return the bytes from `offset` on as a read-only array. Raises ValueError unless they lie in the "
          "file after its first 8 bytes.");
  m.def("copy_of", &copy_of, "array"_a, "Return a copy of the array in newly allocated memory.");
}

}  // namespace octavo
