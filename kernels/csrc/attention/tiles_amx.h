// Products of attention on AMX tiles: over bf16 pages, called by the sides in bf16_tiles_avx512.cpp, and of
// bytes.
//
// A tile multiplies 16 rows of 32 bf16 values by 16 columns. Keys stand in pages row by row, so for scores
// they are the rows and queries the columns; of the weighted sum values are the columns, two positions a
// pair.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::amx {

// Rows of 16 positions, `stride` bytes apart, in each of the four blocks of a tile; none of them is null.
// `next`: where those of the tile after it begin, to be asked for meanwhile, or null.
struct KeyBlocks {
  const uint8_t* rows[4];
  const uint8_t* next[4];
  int64_t stride;
};

// scores[row][64] = query . key, for `num_rows` rows and the blocks in `blocks` (bits); what stands in the
// others means nothing. Queries: [num_rows / 16, rounded up][steps][16 pairs][16 rows][2], of 32 dims a step.
void score_tile(const KeyBlocks& keys, uint32_t blocks, const uint16_t* queries, int steps, int num_rows,
                float* scores);

// Columns of a weighted sum of values under `num_rows` rows. The tiles of this thread are in use for the life
// of the object.
class WeightedSum {
 public:
  explicit WeightedSum(int num_rows);
  ~WeightedSum();
  WeightedSum(const WeightedSum&) = delete;
  WeightedSum& operator=(const WeightedSum&) = delete;

  // accumulators[row][stride bytes, the first 32 * parts floats] += weights[row][64] . values [parts][2
  // vectors] [32 pairs of positions][16][2]. `halves` says in which halves of the 64 positions there are any.
  void add(const uint16_t* weights, const uint16_t* values, int parts, uint32_t halves, int64_t stride,
           float* accumulators);

 private:
  int num_rows_, upper_, lower_;
};

// ---- rows of two bytes a value: integer products, exact in any order ----

constexpr int kByteRows = 16;                  // rows of a call, at most
constexpr int kByteProducts = kByteRows * 64;  // of high bytes; as many of low ones follow

// Products of rows of queries with a panel of keys.
class ByteScores {
 public:
  explicit ByteScores(int num_rows);
  ~ByteScores();
  ByteScores(const ByteScores&) = delete;
  ByteScores& operator=(const ByteScores&) = delete;

  // products[2][16][64] of the high and the low bytes of `num_rows` <= 16 rows, [row][2][dim] signed, with a
  // panel [dim / 4][64 positions][4] unsigned; dim is a multiple of 64.
  void multiply(const int8_t* queries, int num_rows, int dim, const void* panel, int32_t* products);

 private:
  int num_rows_;
};

// Products of weights with a panel of values.
class ByteSums {
 public:
  explicit ByteSums(int num_rows);
  ~ByteSums();
  ByteSums(const ByteSums&) = delete;
  ByteSums& operator=(const ByteSums&) = delete;

  // Of `num_rows` <= 16 rows, the weights [row][2][64 positions] unsigned: those of the calls that follow.
  void load_weights(const uint8_t* weights, int num_rows);

  // products[2][16][32] of their high and low bytes with two vectors of the panel [16][row of `stride`
  // bytes][4 positions] signed.
  void multiply(const void* panel, int64_t stride, int32_t* products);

 private:
  int num_rows_;
};

}  // namespace octavo::amx
