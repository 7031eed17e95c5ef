// The page pool as an MLX array, and primitives that write to it in place.
#pragma once

#include <utility>
#include <vector>

#include "attention/primitives.h"

namespace octavo {

// Returns zeros, uint8 [count, bytes], in memory for page pools; both must be at least 1.
mx::array zeroed_rows(int count, int bytes);

mx::array create_pool(const PageLayout& layout);

std::pair<mx::array, mx::array> write_pages(const PageLayout& layout, const mx::array& pool,
                                            const mx::array& keys, const mx::array& values,
                                            const mx::array& slots, const mx::array& flags);

mx::array copy_pages(const PageLayout& layout, const mx::array& pool,
                     const std::vector<std::pair<int, int>>& pairs);

std::pair<mx::array, mx::array> gather_pages(const PageLayout& layout, const mx::array& pool,
                                             const mx::array& page_table, const mx::array& kv_len, int length,
                                             const mx::array& like);

}  // namespace octavo
