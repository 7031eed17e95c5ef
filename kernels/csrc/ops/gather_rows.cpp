#include "ops/gather_rows.h"

#include <cstring>

#include "program/primitive.h"

namespace octavo {
namespace {

class SelectRows : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;

  const char* name() const override { return "octavo.select_rows"; }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    Encoder encoder(stream());
    const mx::array x = row_contiguous(inputs[0], encoder), ids = row_contiguous(inputs[1], encoder);
    allocate(outputs[0]);
    const int num_rows = x.shape(0);
    const std::size_t row_bytes = x.nbytes() / num_rows;
    encoder.dispatch([from = x.data<char>(), ids = ids.data<int32_t>(), count = ids.size(),
                      to = outputs[0].data<char>(), num_rows, row_bytes] {
      for (std::size_t i = 0; i < count; ++i) {
        require(ids[i] >= -num_rows && ids[i] < num_rows,
                "row " + std::to_string(ids[i]) + " is outside the " + std::to_string(num_rows) + " rows");
        const std::size_t row = ids[i] < 0 ? ids[i] + num_rows : ids[i];
        std::memcpy(to + i * row_bytes, from + row * row_bytes, row_bytes);
      }
    });
  }
};

}  // namespace

mx::array select_rows(const mx::array& x, const mx::array& ids, mx::StreamOrDevice stream) {
  require(x.ndim() >= 1 && x.size() > 0 && (x.itemsize() == 2 || x.itemsize() == 4),
          "x must have rows of 2-byte or 4-byte values, got " + dtype_text(x.dtype()) + " " + shape_text(x));
  require(mx::issubdtype(ids.dtype(), mx::integer), "ids must be integers, got " + dtype_text(ids.dtype()));
  mx::Shape shape = ids.shape();
  shape.insert(shape.end(), x.shape().begin() + 1, x.shape().end());
  return mx::array(shape, x.dtype(), std::make_shared<SelectRows>(cpu_stream(stream)),
                   {x, mx::astype(ids, mx::int32, stream)});
}

}  // namespace octavo
