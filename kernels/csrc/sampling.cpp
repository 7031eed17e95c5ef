#include "sampling.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"
#include "primitive.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Ids = nb::ndarray<const int64_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<const float, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const bool, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// One draw from one row of logits.
struct Draw {
  int row;
  float temperature;
  int top_k;
  double top_p;
  float min_p;
  uint64_t seed, counter;
  std::optional<Ids> changed_ids;
  std::optional<Values> changed;
  std::optional<Mask> allowed;

  RowChanges changes() const {
    return {changed_ids ? changed_ids->data() : nullptr, changed ? changed->data() : nullptr,
            changed_ids ? static_cast<int>(changed_ids->size()) : 0, allowed ? allowed->data() : nullptr};
  }
};

void check(const Draw& draw, int num_rows, int size) {
  require(draw.row >= 0 && draw.row < num_rows,
          "row must lie in [0, " + std::to_string(num_rows) + "), got " + std::to_string(draw.row));
  require(draw.temperature >= 0 && draw.top_k >= 0 && draw.top_p > 0 && draw.min_p >= 0 && draw.min_p <= 1,
          "temperature and top_k must not be negative, top_p must be above 0 and min_p lie in [0, 1]");
  const std::size_t ids = draw.changed_ids ? draw.changed_ids->size() : 0;
  const std::size_t values = draw.changed ? draw.changed->size() : 0;
  require(ids == values, "changed needs one logit for each of changed_ids, got " + std::to_string(values) + " for " +
                             std::to_string(ids));
  for (std::size_t i = 0; i < ids; ++i)
    if (const int64_t id = draw.changed_ids->data()[i]; id < 0 || id >= size)
      throw std::invalid_argument("changed_ids must lie in [0, " + std::to_string(size) + "), got " +
                                  std::to_string(id));
  require(!draw.allowed || static_cast<int>(draw.allowed->size()) == size,
          "allowed must have one flag for each of " + std::to_string(size) + " tokens");
}

// The first number of NumPy's Philox(key=seed, counter=counter): Philox4x64-10 (Salmon et al. 2011) of
// the counter plus 1.
uint64_t philox(uint64_t seed, uint64_t counter) {
  uint64_t word[4] = {counter + 1, counter + 1 == 0, 0, 0}, key[2] = {seed, 0};
  for (int round = 0; round < 10; ++round) {
    const auto a = static_cast<unsigned __int128>(word[0]) * 0xD2E7470EE14C6C93u;
    const auto b = static_cast<unsigned __int128>(word[2]) * 0xCA5A826395121157u;
    word[0] = static_cast<uint64_t>(b >> 64) ^ word[1] ^ key[0];
    word[1] = static_cast<uint64_t>(b);
    word[2] = static_cast<uint64_t>(a >> 64) ^ word[3] ^ key[1];
    word[3] = static_cast<uint64_t>(a);
    key[0] += 0x9E3779B97F4A7C15u;
    key[1] += 0xBB67AE8584CAA73Bu;
  }
  return word[0];
}

#define OCTAVO_DRAW(level, call) \
  (call.type == Float::f32 ? level::draw_from_floats(call) : level::draw_from_halves(call))

int draw_row(const RowDraw& call) {
#if defined(__x86_64__)
  if (isa() >= Isa::avx512) return OCTAVO_DRAW(avx512, call);
  if (isa() == Isa::avx2) return OCTAVO_DRAW(avx2, call);
#endif
  return OCTAVO_DRAW(generic, call);
}

// Evaluated logits, row after row.
struct Rows {
  const char* data;
  Float type;
  int count, size;
};

std::vector<std::optional<int>> draw_from(const Rows& rows, const std::vector<Draw>& draws) {
  for (const Draw& draw : draws) check(draw, rows.count, rows.size);
  std::vector<std::optional<int>> tokens(draws.size());
  const nb::gil_scoped_release release;
  parallel_for(static_cast<int>(draws.size()), [&](int i) {
    const Draw& draw = draws[i];
    const std::size_t start = static_cast<std::size_t>(draw.row) * rows.size * float_size(rows.type);
    const RowDraw call{rows.data + start, rows.type, rows.size, draw.temperature, draw.top_k, draw.top_p,
                       draw.min_p, static_cast<double>(philox(draw.seed, draw.counter) >> 11) * 0x1p-53,
                       draw.changes()};
    if (const int token = draw_row(call); token != kNotFinite) tokens[i] = token;
  });
  return tokens;
}

std::vector<std::optional<int>> draw_tokens(const mx::array& logits, const std::vector<Draw>& draws) {
  require(logits.ndim() == 2 && logits.shape(1) > 0 && is_float(logits.dtype()),
          "logits must be floats [rows, vocabulary], got " + dtype_text(logits.dtype()) + " " + shape_text(logits));
  if (draws.empty()) return {};
  mx::array evaluated = mx::contiguous(logits);
  evaluated.eval();
  return draw_from({evaluated.data<char>(), float_of(evaluated.dtype()), evaluated.shape(0), evaluated.shape(1)},
                   draws);
}

using NumpyRows = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::vector<std::optional<int>> draw_tokens_from_numpy(const NumpyRows& logits, const std::vector<Draw>& draws) {
  require(logits.shape(1) > 0, "logits must be floats [rows, vocabulary], got rows of none");
  return draw_from({reinterpret_cast<const char*>(logits.data()), Float::f32, static_cast<int>(logits.shape(0)),
                    static_cast<int>(logits.shape(1))},
                   draws);
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<Draw>(m, "Draw", "A draw from one row of logits; see draw_tokens.")
      .def("__init__",
           [](Draw* self, int row, float temperature, int top_k, double top_p, float min_p, uint64_t seed,
              uint64_t counter, std::optional<Ids> changed_ids, std::optional<Values> changed,
              std::optional<Mask> allowed) {
             new (self) Draw{row,  temperature, top_k, top_p, min_p, seed, counter, std::move(changed_ids),
                             std::move(changed), std::move(allowed)};
           },
           "row"_a, nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a, "counter"_a,
           "changed_ids"_a = nb::none(), "changed"_a = nb::none(), "allowed"_a = nb::none(),
           "changed [N] float32: the logits of the tokens changed_ids [N] int64 in the place of the row's own; "
           "allowed [V] bool: the others are not drawn, unless changed_ids names them.");
  m.def("draw_tokens_from_numpy", &draw_tokens_from_numpy, "logits"_a.noconvert(), "draws"_a,
        "draw_tokens from a float32 array of NumPy's, which is not copied.");
  m.def("draw_tokens", &draw_tokens, "logits"_a, "draws"_a,
        "The token of each draw from logits [rows, vocabulary], as engine/truncation.py draws with the "
        "number of Philox(key=seed, counter=counter); None for a row that is not finite. temperature 0 "
        "takes the largest, the lowest id among equals. ValueError for what lies out of range.");
}

}  // namespace octavo
