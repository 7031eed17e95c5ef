// Sampling requests from Python, checked before a kernel reads them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "program/primitive.h"
#include "sampling/sampling.h"

namespace octavo {
namespace {

namespace nb = nanobind;

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

}  // namespace
}  // namespace octavo
