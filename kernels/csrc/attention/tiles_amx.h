// Products of attention on AMX tiles: for bf16 pages, called by the sides in bf16_tiles_avx512.cpp, and for
// bytes.
//
// A tile multiplies 16 rows of 32 bf16 values by 16 columns. Keys are stored row by row in pages, so for
// scores they are the rows and queries the columns. In the weighted sum values are the columns, in pairs of
// positions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::amx {

// Rows of 16 positions, `stride` bytes apart, in each of the four blocks of a tile; none of them is null.
// `next`: start of those in the next tile, for prefetching, or null.
struct KeyBlocks {
  const uint8_t* rows[4];
  const uint8_t* next[4];
  int64_t stride;
};

// scores[row][64] = query . key, for `num_rows` rows and the blocks in `blocks` (bits); other blocks get
// meaningless scores. Queries: [num_rows / 16, rounded up][steps][16 pairs][16 rows][2], of 32 dims a step.
void score_tile(const KeyBlocks& keys, uint32_t blocks, const uint16_t* queries, int steps, int num_rows,
                float* scores);

// Columns of a weighted sum of values under `num_rows` rows; the object occupies this thread's tiles.
class WeightedSum {
 public:
  explicit WeightedSum(int num_rows);
  ~WeightedSum();
  WeightedSum(const WeightedSum&) = delete;
  WeightedSum& operator=(const WeightedSum&) = delete;

  // accumulators[row][stride bytes, the first 32 * parts floats] += weights[row][64] . values [parts][2
  // vectors] [32 pairs of positions][16][2]. `halves`: which halves of the 64 positions are present.
  void add(const uint16_t* weights, const uint16_t* values, int parts, uint32_t halves, int64_t stride,
           float* accumulators);

 private:
  int num_rows_, upper_, lower_;
};

// ---- rows of bytes: integer products, exact in any order ----
//
// Up to 16 rows in two bytes a value (parts 2: their high bytes, then their low ones), or up to 32 in one.

constexpr int kByteRows = 16;  // rows of a tile
constexpr int kByteProducts =
    kByteRows * 64;  // of high bytes, or of the first 16 rows; those of the others follow

// Products of rows of queries with a panel of keys.
template <int kParts>
class ByteScores {
 public:
  static constexpr int kRows = kByteRows * 2 / kParts;  // largest number in a call

  ByteScores() = default;
  ~ByteScores();
  ByteScores(const ByteScores&) = delete;
  ByteScores& operator=(const ByteScores&) = delete;

  // products[2][16][64] of `num_rows` rows, [row][kParts][dim] signed, with a panel [dim / 4][64
  // positions][4] unsigned; dim is a multiple of 64.
  void multiply(const int8_t* queries, int num_rows, int dim, const void* panel, int32_t* products);

 private:
  int num_rows_ = 0;
};

// Products of weights with a panel of values.
template <int kParts>
class ByteSums {
 public:
  static constexpr int kRows = kByteRows * 2 / kParts;  // largest number in a call

  ByteSums() = default;
  ~ByteSums();
  ByteSums(const ByteSums&) = delete;
  ByteSums& operator=(const ByteSums&) = delete;

  // Loads weights [row][kParts][64 positions], unsigned, of `num_rows` rows for the following calls.
  void load_weights(const uint8_t* weights, int num_rows);

  // products[2][16][32] with two vectors of the panel [16][row of `stride` bytes][4 positions] signed.
  void multiply(const void* panel, int64_t stride, int32_t* products);

 private:
  int num_rows_ = 0;
};

}  // namespace octavo::amx
