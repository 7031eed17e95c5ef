// The Python module `octavo.kernels._ext`.
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "mlx/version.h"
#include "runtime/dispatch.h"
#include "runtime/threads.h"

namespace nb = nanobind;

namespace octavo {

// Version of the module's interface for kernels/backends.py. It is raised whenever functions or their meaning
// change, so that an extension built from older sources is reported instead of run.
constexpr int kAbiVersion = 11;

void bind_linear(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_mapped_file(nb::module_& m);
void bind_quantize(nb::module_& m);
void bind_ops(nb::module_& m);
void bind_program(nb::module_& m);
void bind_recurrent(nb::module_& m);
void bind_sampling(nb::module_& m);

namespace {

// MLX's C++ interface may change with every patch release, so only the version that was compiled against is
// accepted.
void check_mlx_version() {
  const std::string built = std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) +
                            "." + std::to_string(MLX_VERSION_PATCH);
  const std::string found = mlx::core::version();
  if (found != built)
    throw nb::import_error(("octavo's native kernels were built for mlx " + built + " but mlx " + found +
                            " is installed; reinstall octavo, or install mlx==" + built)
                               .c_str());
}

// Report a wrong OCTAVO_CPU_* variable when the module is loaded, not in the middle of a request.
void check_environment() {
  try {
    isa();
    default_threads();
  } catch (const std::invalid_argument& error) {
    throw nb::import_error(error.what());
  }
}

}  // namespace
}  // namespace octavo

NB_MODULE(_ext, m) {
  nb::module_::import_("mlx.core");  // registers mx.array before signatures use it
  octavo::check_mlx_version();
  octavo::check_environment();
  m.attr("ABI_VERSION") = octavo::kAbiVersion;
  m.attr("mlx_version") = mlx::core::version();
  m.def("isa", [] { return octavo::isa_name(octavo::isa()); }, "Name of the instruction set in use.");
  m.def("threads", &octavo::num_threads, "Number of threads that a kernel may use.");
  m.def("set_threads", &octavo::set_threads, nb::arg("n"), "Set the number of threads, at most 1024.");
  octavo::bind_linear(m);
  octavo::bind_attention(m);
  octavo::bind_mapped_file(m);
  octavo::bind_quantize(m);
  octavo::bind_ops(m);
  octavo::bind_program(m);
  octavo::bind_recurrent(m);
  octavo::bind_sampling(m);
}
