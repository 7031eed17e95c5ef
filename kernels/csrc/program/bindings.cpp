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
#include "pages/indices.h"
#include "program/primitive.h"
#include "program/program.h"
#include "program/step_memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Values = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;

// The input behind those that `values` fill, of which the first is `input`.
std::size_t end_of(const std::vector<mx::array>& filled, std::size_t input, const Values& values) {
  const std::size_t first = input;
  std::size_t size = 0;
  while (input < filled.size() && (input == first || size < values.size())) size += filled[input++].size();
  require(size == values.size(), "input " + std::to_string(first) + " of the program has shape " +
                                     shape_text(filled[first]) + ", got " + std::to_string(values.size()) +
                                     " values, which end with neither it nor a later one");
  return input;
}

void run(Program& program, const std::vector<Values>& values) {
  const std::vector<mx::array>& filled = program.filled();
  std::size_t num_filled = 0, num_given = 0;
  for (; num_given < values.size() && num_filled < filled.size(); ++num_given)
    num_filled = end_of(filled, num_filled, values[num_given]);
  require(num_given == values.size() && num_filled == filled.size(),
          "the program has " + std::to_string(filled.size()) + " inputs, got " +
              std::to_string(values.size()) + " values for " + std::to_string(num_filled) + " of them");
  auto input = filled.begin();
  for (const Values& each : values) {
    const int32_t* from = each.data();
    do {
      std::memcpy(mx::array(*input).data<int32_t>(), from, 4 * input->size());
      from += input->size();
      ++input;
    } while (from < each.data() + each.size());
  }
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

using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

bool are_ints(const Array& array, std::size_t num_dims) {
  return array.ndim() == num_dims && array.dtype() == nb::dtype<int32_t>();
}

Ints ints(const Array& array) { return {static_cast<const int32_t*>(array.data()), array.size()}; }

using Packed = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

bool pack_indices(const Packed& packed, const Array& positions, const Array& slots, const Array& q_start,
                  const Array& kv_len, const Array& page_table, const std::optional<Array>& quantize_after,
                  int64_t page_size, int64_t num_pages) {
  for (const Array* array : {&positions, &slots, &q_start, &kv_len})
    if (!are_ints(*array, 1)) return false;
  if (!are_ints(page_table, 2) || page_table.shape(0) != kv_len.size()) return false;
  if (quantize_after && (!are_ints(*quantize_after, 1) || quantize_after->size() != kv_len.size()))
    return false;
  const StepIndices step = {ints(positions), ints(slots),      ints(q_start),
                            ints(kv_len),    ints(page_table), static_cast<int64_t>(page_table.shape(1))};
  if (!are_inside(step, page_size, num_pages)) return false;
  pack(step, quantize_after ? ints(*quantize_after) : Ints{}, {packed.data(), packed.size()});
  return true;
}

}  // namespace

void bind_program(nb::module_& m) {
  nb::class_<Arena>(m, "Arena", "Memory that programs which never run at the same time share.")
      .def(nb::new_([] { return std::make_shared<Arena>(); }))
      .def_prop_ro("nbytes", &Arena::nbytes);
  nb::class_<Program>(m, "Program", "A graph as a list of what our kernels do in it; see Program.run.")
      .def(
          "__init__", &create, "arena"_a, "filled"_a, "fixed"_a, "outputs"_a,
          "Captures what computes `outputs` from `filled`, int32 arrays that get new values in each run, and "
          "`fixed`, arrays that keep their place in memory. ValueError names what cannot be captured.")
      .def(
          "run", &run, "values"_a,
          "Copies values (C-contiguous int32) into the filled inputs, in their order, and computes; each "
          "array is for one input, or for several, one after the other. The results are in `outputs` until a "
          "program of the same arena is captured or run.")
      .def_prop_ro("outputs", &Program::outputs)
      .def_prop_ro("num_tasks", &Program::num_tasks)
      .def_prop_ro("num_evaluated", &Program::num_evaluated);
  m.def("pack_indices", &pack_indices, "packed"_a, "positions"_a, "slots"_a, "q_start"_a, "kv_len"_a,
        "page_table"_a, "quantize_after"_a.none(), "page_size"_a, "num_pages"_a,
        "Whether AttentionMetadata.check has nothing to say of these arrays. If so, fills `packed`, int32, "
        "with slots, q_start, kv_len, page_table with zeros on its right, quantize_after (None: zeros), and "
        "a zero for each row. The size of `packed` says how wide the table becomes: ValueError if it does "
        "not.");
  m.def("kernel_seconds", &KernelTime::seconds,
        "Time that this process has spent in our kernels, on the threads that call them.");
  m.def("kept_bytes", &kept_bytes,
        "Bytes that are kept of the results of steps, for those of the next one; no array has them now.");
  m.def("release_kept", &release_kept, "Gives back what is kept.");
  m.def("select_rows", &select_rows, "x"_a, "ids"_a, nb::kw_only(), "stream"_a = nb::none(),
        "x[ids], copied: rows ids int32 [...] of x [N, ...]. Rows outside of x end the evaluation with an "
        "error.");
  m.def("compute_rows", &compute_rows, "x"_a, "ids"_a, nb::kw_only(), "stream"_a = nb::none(),
        "x[ids] for ids [S]; what is still to be computed of x on the way, after the last operation that "
        "mixes rows, is computed of these rows only.");
}

}  // namespace octavo
