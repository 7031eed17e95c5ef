#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace octavo {

void bind_linear(nb::module_&) {}

}  // namespace octavo
