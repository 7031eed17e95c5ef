// Sampling requests from Python, checked before a kernel reads them.
#include "sampling/sampling.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "program/primitive.h"
#include "runtime/dispatch.h"
#include "runtime/threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Ids = nb::ndarray<const int64_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<const float, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const bool, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int kMostScored = 1024;  // most tokens of a row that may be returned with scores

// RowChanges together with the arrays that they point to.
struct Changes {
  Ids biased;
  Values bias;
  Ids seen;
  float repetition_penalty;
  Ids output;
  Values output_counts;
  float frequency_penalty, presence_penalty;
  Ids suppressed;
};

TokenList list_of(const Ids& ids) { return {ids.data(), static_cast<int>(ids.size())}; }

// Parameters for sampling a token from one row of logits.
struct Draw {
  int row;
  float temperature;
  int top_k;
  double top_p;
  float min_p;
  uint64_t seed, counter;
  std::optional<Changes> changes;
  std::optional<Mask> allowed;
  std::optional<int> num_top;

  RowChanges row_changes() const {
    RowChanges made{};
    if (changes) {
      const Changes& c = *changes;
      made = {list_of(c.biased),     c.bias.data(),
              list_of(c.seen),       c.repetition_penalty,
              list_of(c.output),     c.output_counts.data(),
              c.frequency_penalty,   c.presence_penalty,
              list_of(c.suppressed), nullptr};
    }
    if (allowed) made.allowed = allowed->data();
    return made;
  }
};

// Natural-log probabilities of a token and of the most likely tokens.
struct TokenScore {
  double logprob;
  std::vector<std::pair<int, double>> top;
};

struct Drawn {  // a sampled token and its score; no token if the row is not finite
  std::optional<int> token;
  std::optional<TokenScore> score;
};

std::string range(int end) { return "lie in [0, " + std::to_string(end) + "), got "; }

void check_row(int row, int num_rows) {
  require(row >= 0 && row < num_rows, "row must " + range(num_rows) + std::to_string(row));
}

void check_num_top(int num_top) {
  require(num_top >= 0 && num_top <= kMostScored,
          "num_top must lie in [0, " + std::to_string(kMostScored) + "], got " + std::to_string(num_top));
}

void check_ids(const char* name, const Ids& ids, int size) {
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (const int64_t id = ids.data()[i]; id < 0 || id >= size)
      throw std::invalid_argument(name + (" must " + range(size)) + std::to_string(id));
}

void check_pairs(const char* name, const Ids& ids, const Values& values) {
  require(ids.size() == values.size(), std::string(name) + " needs one number for each token, got " +
                                           std::to_string(values.size()) + " for " +
                                           std::to_string(ids.size()));
}

void check(const Changes& changes, int size) {
  check_pairs("bias", changes.biased, changes.bias);
  check_pairs("output_counts", changes.output, changes.output_counts);
  check_ids("bias_ids", changes.biased, size);
  check_ids("seen_ids", changes.seen, size);
  check_ids("output_ids", changes.output, size);
  check_ids("suppressed_ids", changes.suppressed, size);
}

void check(const Draw& draw, int num_rows, int size) {
  check_row(draw.row, num_rows);
  require(draw.temperature >= 0 && draw.top_k >= 0 && draw.top_p > 0 && draw.min_p >= 0 && draw.min_p <= 1,
          "temperature and top_k must not be negative, top_p must be above 0 and min_p lie in [0, 1]");
  if (draw.changes) check(*draw.changes, size);
  if (draw.num_top) check_num_top(*draw.num_top);
  require(!draw.allowed || static_cast<int>(draw.allowed->size()) == size,
          "allowed must have one flag for each of " + std::to_string(size) + " tokens");
}

// Returns the first output of NumPy's Philox(key=seed, counter=counter): Philox4x64-10 (Salmon et al. 2011)
// of counter + 1.
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

// Rows of evaluated logits.
class Rows {
 public:
  explicit Rows(const mx::array& logits) : logits_(mx::contiguous(logits)) {
    require(logits.ndim() == 2 && logits.shape(1) > 0 && is_float(logits.dtype()),
            "logits must be floats [rows, vocabulary], got " + dtype_text(logits.dtype()) + " " +
                shape_text(logits));
    logits_.eval();
  }

  int count() const { return logits_.shape(0); }
  int size() const { return logits_.shape(1); }

  Row operator[](int row) const {
    const Float type = float_of(logits_.dtype());
    return {logits_.data<char>() + static_cast<std::size_t>(row) * size() * float_size(type), type, size()};
  }

 private:
  mx::array logits_;
};

TokenScore score_of(const RowScores& scores) {
  TokenScore score{static_cast<double>(scores.logit) - scores.log_total, {}};
  for (int i = 0; i < scores.num_top; ++i)
    score.top.emplace_back(scores.top[i].id, static_cast<double>(scores.top[i].logit) - scores.log_total);
  return score;
}

Drawn draw_one(const Row& row, const Draw& draw) {
  const double uniform = static_cast<double>(philox(draw.seed, draw.counter) >> 11) * 0x1p-53;
  const RowDraw call{row, draw.temperature, draw.top_k, draw.top_p, draw.min_p, uniform, draw.row_changes()};
  Likely top[kMostScored];
  RowScores scores{draw.num_top.value_or(0), top, 0, 0, 0};
  const int token = OCTAVO_AT_LEVEL(draw_token, call, draw.num_top ? &scores : nullptr);
  if (token == kNotFinite) return {};
  return {token, draw.num_top ? std::optional(score_of(scores)) : std::nullopt};
}

std::vector<Drawn> draw_tokens(const mx::array& logits, const std::vector<Draw>& draws) {
  const Rows rows(logits);
  for (const Draw& draw : draws) check(draw, rows.count(), rows.size());
  std::vector<Drawn> drawn(draws.size());
  const nb::gil_scoped_release release;
  parallel_for(static_cast<int>(draws.size()),
               [&](int i) { drawn[i] = draw_one(rows[draws[i].row], draws[i]); });
  return drawn;
}

std::vector<std::optional<TokenScore>> score_tokens(const mx::array& logits,
                                                    const std::vector<std::tuple<int, int, int>>& targets) {
  const Rows rows(logits);
  for (const auto& [row, token, num_top] : targets) {
    check_row(row, rows.count());
    require(token >= 0 && token < rows.size(), "token must " + range(rows.size()) + std::to_string(token));
    check_num_top(num_top);
  }
  std::vector<std::optional<TokenScore>> found(targets.size());
  const nb::gil_scoped_release release;
  parallel_for(static_cast<int>(targets.size()), [&](int i) {
    const auto [row, token, num_top] = targets[i];
    Likely top[kMostScored];
    RowScores scores{num_top, top, 0, 0, 0};
    if (OCTAVO_AT_LEVEL(score_token, rows[row], token, scores)) found[i] = score_of(scores);
  });
  return found;
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<Changes>(
      m, "LogitAdjustments",
      "Changes of the logits of some tokens; see engine/executor/sampling/logits_processors.py.")
      .def(nb::init<Ids, Values, Ids, float, Ids, Values, float, float, Ids>(), "bias_ids"_a, "bias"_a,
           "seen_ids"_a, "repetition_penalty"_a, "output_ids"_a, "output_counts"_a, "frequency_penalty"_a,
           "presence_penalty"_a, "suppressed_ids"_a,
           "Ids are int64 and numbers float32; arrays that belong together have one length. The arrays are "
           "not copied.");
  nb::class_<Draw>(m, "Draw", "Parameters for sampling a token from one row of logits; see draw_tokens.")
      .def(nb::init<int, float, int, double, float, uint64_t, uint64_t, std::optional<Changes>,
                    std::optional<Mask>, std::optional<int>>(),
           "row"_a, nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a, "counter"_a,
           "changes"_a = nb::none(), "allowed"_a = nb::none(), "num_top"_a = nb::none(),
           "allowed [V] bool: tokens that may be sampled. num_top: also return log-probabilities of the "
           "sampled token and of the num_top likeliest tokens.");
  nb::class_<TokenScore>(m, "TokenScore", "Natural-log probabilities of a token and of the likeliest tokens.")
      .def_ro("logprob", &TokenScore::logprob)
      .def_ro("top", &TokenScore::top,
              "Pairs (token, log-probability), the likeliest first; equal ones by id.");
  nb::class_<Drawn>(m, "Drawn", "A sampled token and its score; no token if the row is not finite.")
      .def_ro("token", &Drawn::token)
      .def_ro("score", &Drawn::score);
  m.def("draw_tokens", &draw_tokens, "logits"_a, "draws"_a,
        "Sample a token for each draw from logits [rows, vocabulary], as "
        "engine/executor/sampling/truncation.py does with the random number Philox(key=seed, "
        "counter=counter). temperature 0 takes the largest logit, with the lowest id among equal ones. "
        "Scores are before temperature and truncation. Raises ValueError for values out of range.");
  m.def("score_tokens", &score_tokens, "logits"_a, "targets"_a,
        "Return, for each (row, token, num_top), the score of the token in logits [rows, vocabulary] and the "
        "num_top likeliest tokens, or None if the row is not finite. Raises ValueError for a bad value.");
}

}  // namespace octavo
