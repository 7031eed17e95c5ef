#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <vector>

#include "ops/gather_rows.h"
#include "program/primitive.h"
#include "program/program.h"
#include "program/step_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Values = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;

// Copies values to inputs from number `input` on; returns the index after the last input that was filled.
std::size_t fill(const Program& program, std::size_t input, const Values& values) {
  const std::vector<Program::Input>& inputs = program.inputs();
  std::size_t end = input, size = 0;
  while (end < inputs.size() && (end == input || size < values.size())) size += inputs[end++].size;
  if (size != values.size())
    throw std::invalid_argument("input " + std::to_string(input) + " of the program has shape " +
                                shape_text(program.filled()[input]) + ", got " +
                                std::to_string(values.size()) + " values, which end inside of an input");
  const int32_t* from = values.data();
  for (; input < end; from += inputs[input++].size)
    std::memcpy(inputs[input].memory, from, sizeof(int32_t) * inputs[input].size);
  return end;
}

void run(Program& program, const nb::sequence& arrays) {
  const std::size_t num_inputs = program.inputs().size();
  std::size_t num_filled = 0, num_more = 0;
  for (const nb::handle array : arrays) {
    Values values;
    if (!nb::try_cast(array, values, false))
      throw nb::type_error("values must be arrays of int32 without gaps");
    if (num_filled < num_inputs) num_filled = fill(program, num_filled, values);
    else ++num_more;
  }
  if (num_filled != num_inputs || num_more != 0)
    throw std::invalid_argument("the program has " + std::to_string(num_inputs) + " inputs, got " +
                                std::to_string(nb::len(arrays)) + " values for " +
                                std::to_string(num_filled) + " of them");
  const nb::gil_scoped_release release;
  program.run();
}

void evaluate_released(std::vector<mx::array> arrays) {
  const nb::gil_scoped_release release;
  mx::eval(std::move(arrays));
}

void create(Program* self, const std::shared_ptr<Arena>& arena, std::vector<mx::array> filled,
            std::vector<mx::array> fixed, std::vector<mx::array> outputs) {
  new (self) Program(arena, std::move(filled), std::move(fixed), std::move(outputs), evaluate_released);
}

}  // namespace

void bind_program(nb::module_& m) {
  nb::class_<Arena>(m, "Arena", "Memory shared by programs that never run at the same time.")
      .def(nb::new_([] { return std::make_shared<Arena>(); }))
      .def_prop_ro("nbytes", &Arena::nbytes);
  nb::class_<Program>(m, "Program", "A captured graph: the list of its native kernel calls; see Program.run.")
      .def("__init__", &create, "arena"_a, "filled"_a, "fixed"_a, "outputs"_a,
           "Capture the computation of `outputs`. `filled`: int32 inputs that get new values in each run. "
           "`fixed`: inputs that keep their address. Raises ValueError for an operation that cannot be "
           "captured.")
      .def("run", &run, "values"_a,
           "Copy values (C-contiguous int32) into the filled inputs, in their order, and compute. An array "
           "may have the values of several consecutive inputs. The results are in `outputs` until a program "
           "of the same arena is captured or run.")
      .def_prop_ro("outputs", &Program::outputs)
      .def_prop_ro("num_tasks", &Program::num_tasks)
      .def_prop_ro("num_evaluated", &Program::num_evaluated);
  m.def("kernel_seconds", &KernelTime::seconds,
        "Return the seconds that this process has spent in native kernels, on the threads that call them.");
  m.def("kept_bytes", &kept_bytes,
        "Return the bytes of unused memory that is kept for the results of the next step.");
  m.def("release_kept", &release_kept, "Free the memory of kept_bytes.");
  m.def("select_rows", &select_rows, "x"_a, "ids"_a, nb::kw_only(), "stream"_a = nb::none(),
        "Return a copy of the rows x[ids], for ids int32 [...] and x [N, ...]. Evaluation fails for an id "
        "outside of x.");
  m.def("compute_rows", &compute_rows, "x"_a, "ids"_a, nb::kw_only(), "stream"_a = nb::none(),
        "Return x[ids] for ids [S]. Unevaluated operations after the last one that mixes rows are computed "
        "for these rows only.");
}

}  // namespace octavo
