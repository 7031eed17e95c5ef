#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace octavo {

void bind_attention(nb::module_&) {}

}  // namespace octavo
