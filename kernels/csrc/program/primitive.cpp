#include "program/primitive.h"

#include <sstream>

#include "mlx/utils.h"

namespace octavo {
namespace {

template <class T>
void copy_elements(const T* source, const mx::Shape& shape, const mx::Strides& strides, std::size_t dim,
                   T*& target) {
  if (dim == shape.size()) {
    *target++ = *source;
    return;
  }
  for (int i = 0; i < shape[dim]; ++i)
    copy_elements(source + i * strides[dim], shape, strides, dim + 1, target);
}

}  // namespace

std::string shape_text(const mx::Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string dtype_text(mx::Dtype type) {
  std::ostringstream text;
  text << type;
  return text.str();
}

std::string array_text(const mx::array& a) { return dtype_text(a.dtype()) + " " + shape_text(a); }

void require_floats(const char* name, const mx::array& x, bool right, const std::string& shape) {
  if (!right || !is_float(x.dtype()))
    throw std::invalid_argument(std::string(name) + " must be bfloat16, float16 or float32 " + shape +
                                ", got " + array_text(x));
}

void require_integers(const char* name, const mx::array& x) {
  require(mx::issubdtype(x.dtype(), mx::integer),
          std::string(name) + " must be integers, got " + dtype_text(x.dtype()));
}

void copy_strided(const char* source, const mx::Shape& shape, const mx::Strides& strides, std::size_t size,
                  char* target) {
  const auto copy = [&](auto kind) {
    using T = decltype(kind);
    T* to = reinterpret_cast<T*>(target);
    copy_elements(reinterpret_cast<const T*>(source), shape, strides, 0, to);
  };
  switch (size) {
    case 1: return copy(uint8_t{});
    case 2: return copy(uint16_t{});
    case 4: return copy(uint32_t{});
    default: return copy(uint64_t{});
  }
}

mx::array row_contiguous(const mx::array& input, Encoder& encoder) {
  if (input.flags().row_contiguous) return input;
  mx::array copy(input.shape(), input.dtype(), nullptr, {});
  allocate(copy);
  encoder.add_temporary(copy);
  encoder.dispatch([from = input.data<char>(), to = copy.data<char>(), shape = input.shape(),
                    strides = input.strides(),
                    size = input.itemsize()] { copy_strided(from, shape, strides, size, to); });
  return copy;
}

mx::array narrow_ids(const mx::array& ids, mx::StreamOrDevice stream) {
  mx::array within = ids;
  if (ids.itemsize() == 8) within = mx::minimum(within, mx::array(INT32_MAX, ids.dtype()), stream);
  if (ids.dtype() == mx::int64) within = mx::maximum(within, mx::array(INT32_MIN, ids.dtype()), stream);
  return mx::astype(within, mx::int32, stream);
}

}  // namespace octavo
