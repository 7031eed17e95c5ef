// Key side for int8 pages: 16-bit integer products (VPMADDWD). Queries become 15-bit fixed point relative to
// the row's largest element. Products of a chunk of dims are summed exactly, and chunks are summed as floats.
#include "attention/byte_queries_avx2.h"
#include "attention/key_sums_avx2.h"
#include "attention/sides_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Queries in memory: int16 rows, then one factor per row.
struct Queries {
  int16_t* rows;
  float* factors;

  Queries(void* memory, int dim, int num_rows)
      : rows(static_cast<int16_t*>(memory)),
        factors(reinterpret_cast<float*>(rows + size_t(num_rows) * dim)) {}
};

size_t query_bytes(int dim, int num_rows) { return size_t(num_rows) * (2 * dim + 4); }

void load_queries(const AttendArgs& args, const AttendItem& item, void* memory) {
  const int num_rows = item.num_tokens * group_size(args), dim = args.layout.k.dim;
  const Queries queries(memory, dim, num_rows);
  alignas(32) int32_t fixed[kMaxDim];
  for (int r = 0; r < num_rows; ++r) {
    queries.factors[r] = fix_query(args, item, r, kLargestWord, fixed) / kLargestWord;
    for (int d = 0; d < dim; ++d) queries.rows[size_t(r) * dim + d] = int16_t(fixed[d]);
  }
}

size_t key_panel_bytes(int) { return 0; }

OCTAVO_INLINE __m256i load_words(const uint8_t* codes) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}

// Scores a block's 16 keys for kRows rows. Rows have kDim dims, or `any_dim` dims if kDim is 0.
template <int kDim, int kRows>
OCTAVO_INLINE void score_rows(const Queries& queries, int first, int any_dim, const uint8_t* keys,
                              const uint8_t* ahead, const float (&scales)[16], float* scores) {
  constexpr int kKeys = kSums / kRows, kWords = kChunk / 16;
  const int dim = kDim > 0 ? kDim : any_dim, chunks = dim / kChunk;
  const __m256 factors = spread_rows<kRows>(queries.factors + first);
  float* const scores_of_rows = scores + size_t(first) * kTileTokens;
  for (int key = 0; key < 16; key += kKeys) {
    __m256 sums[kSums];
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) sums[i] = _mm256_setzero_ps();
    for (int c = 0; c < chunks; ++c) {
      const int16_t* rows = queries.rows + size_t(first) * dim + c * kChunk;
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; ++i) {
        const int at = (key + i) * dim + c * kChunk;
        if (first == 0) __builtin_prefetch(ahead + at);
        __m256i words[kWords];
#pragma GCC unroll 4
        for (int j = 0; j < kWords; ++j) words[j] = load_words(keys + at + 16 * j);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          __m256i exact = _mm256_madd_epi16(words[0], load256(rows + r * dim));
#pragma GCC unroll 4
          for (int j = 1; j < kWords; ++j)
            exact = _mm256_add_epi32(exact, _mm256_madd_epi16(words[j], load256(rows + r * dim + 16 * j)));
          __m256& to = sums[r * kKeys + i];
          to = _mm256_add_ps(to, _mm256_cvtepi32_ps(exact));
        }
      }
    }
    const __m256 total = _mm256_mul_ps(reduce(sums), spread_keys<kRows>(scales + key));
    store_scores<kRows>(_mm256_mul_ps(total, factors), scores_of_rows + key);
  }
}
static_assert(int64_t(kChunk) / 8 * 128 * kLargestWord <= INT32_MAX);

template <int kDim>
void score_dims(const PageLayout& layout, const Tile& tile, const Queries& queries, int num_rows,
                float* scores) {
  const RowFormat& format = layout.k;
  for (int b = 0; b < kBlocks; ++b) {
    const Tile::Block& block = tile.blocks[b];
    if (block.base == nullptr) continue;
    const Tile::Block& soon = tile.next[b].base != nullptr ? tile.next[b] : block;
    const uint8_t* const ahead = k_codes(layout, soon.base, soon.offset);
    prefetch(k_scale(layout, soon.base, soon.offset), 16 * format.scale_bytes);
    const uint8_t* const codes = k_codes(layout, block.base, block.offset);
    float scales[16];
    load_halves(k_scale(layout, block.base, block.offset), tile.mask(b), scales);
    for_rows(num_rows, [&](int row, auto rows) {
      score_rows<kDim, rows()>(queries, row, format.dim, codes, ahead, scales, scores + 16 * b);
    });
  }
}

void score(const PageLayout& layout, const Tile& tile, const void* memory, int num_rows, void*,
           float* scores) {
  const int dim = layout.k.dim;
  const Queries queries(const_cast<void*>(memory), dim, num_rows);
  const auto run = dim == 64 ? score_dims<64> : dim == 128 ? score_dims<128> : score_dims<0>;
  run(layout, tile, queries, num_rows, scores);
}

constexpr KeySide sides = {query_bytes, key_panel_bytes, load_queries, score};

}  // namespace

const KeySide* int8_keys(CodeType codes) { return codes == CodeType::int8 ? &sides : nullptr; }

}  // namespace octavo::OCTAVO_ISA
