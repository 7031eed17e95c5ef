// RWKV-7. The pass over a row for one token also computes S a for the next token.
#include "recurrent/loops.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kBlock = 16;  // tokens prepared at once

// Inputs of tokens that all rows of a head use: r, w, k, a, b [D each], adjacent in memory.
struct Tokens {
  float* vectors;
  int size;

  const float* at(int t, int which) const { return vectors + (static_cast<int64_t>(5 * t) + which) * size; }
  const float* r(int t) const { return at(t, 0); }
  const float* w(int t) const { return at(t, 1); }
  const float* k(int t) const { return at(t, 2); }
  const float* a(int t) const { return at(t, 3); }
  const float* b(int t) const { return at(t, 4); }
};

void prepare(const WkvCall& call, int head, int first, int count, Tokens& tokens) {
  const Rows* const inputs[] = {&call.r, &call.w, &call.k, &call.a, &call.b};
  float* to = tokens.vectors;
  for (int t = 0; t < count; ++t)
    for (const Rows* rows : inputs) {
      load_row(*rows, first + t, static_cast<int64_t>(head) * call.D, call.D, to);
      to += call.D;
    }
}

// Sums for kGroup rows.
struct GroupSums {
  float sa[kGroup], v[kGroup], y[kGroup];
};

template <int R>
inline void read_tile(const float* state, const Tokens& tokens, int row, GroupSums& group) {
  Vec acc[kTile]{};
  for (int i = 0; i < tokens.size; i += kLanes) {
    prefetch<R * kLanes>(state + static_cast<int64_t>(R) * i);
    const Vec a = load(tokens.a(0) + i);
    for (int r = 0; r < R; ++r)
      acc[r] = fma(load(state + static_cast<int64_t>(r) * tokens.size + i), a, acc[r]);
  }
  store_sums(acc, group.sa + row);
}

template <int R, bool kNext>
inline void update_tile(const float* from, float* to, const Tokens& tokens, int t, int row,
                        GroupSums& group) {
  Vec y[kTile]{}, sa[kTile]{}, v[R], u[R];
  for (int r = 0; r < R; ++r) v[r] = splat(group.v[row + r]), u[r] = splat(group.sa[row + r]);
  for (int i = 0; i < tokens.size; i += kLanes) {
    const Vec w = load(tokens.w(t) + i), k = load(tokens.k(t) + i), b = load(tokens.b(t) + i);
    const Vec out = load(tokens.r(t) + i), next = kNext ? load(tokens.a(t + 1) + i) : Vec{};
    for (int r = 0; r < R; ++r) {
      const int64_t at = static_cast<int64_t>(r) * tokens.size + i;
      const Vec s = fma(v[r], k, fma(u[r], b, load(from + at) * w));
      store(to + at, s);
      y[r] = fma(s, out, y[r]);
      if constexpr (kNext) sa[r] = fma(s, next, sa[r]);
    }
  }
  store_sums(y, group.y + row);
  if constexpr (kNext) store_sums(sa, group.sa + row);
}

void walk_group(const WkvCall& call, const float* from, float* to, int rows, const Tokens& tokens, int count,
                int first, int64_t column) {
  GroupSums group{};
  for_tiles(rows, [&](auto size, int row) {
    read_tile<size>(from + static_cast<int64_t>(row) * call.D, tokens, row, group);
  });
  for (int t = 0; t < count; ++t) {
    load_row(call.v, first + t, column, rows, group.v);
    for_tiles(rows, [&](auto size, int row) {
      const int64_t at = static_cast<int64_t>(row) * call.D;
      if (t + 1 < count) update_tile<size, true>(from + at, to + at, tokens, t, row, group);
      else update_tile<size, false>(from + at, to + at, tokens, t, row, group);
    });
    const int64_t out = (static_cast<int64_t>(first) + t) * call.H * call.D + column;
    store_floats(call.y, call.r.type, out, rows, group.y);
    from = to;
  }
}

void walk_piece(const WkvCall& call, const Piece& piece, int head, RowRange rows) {
  const int64_t width = call.D, size = width * width;
  HeadRows state(call.pool, piece, call.H * size, head * size + rows.first * width,
                 (rows.last - rows.first) * width);
  Tokens tokens{static_cast<float*>(thread_scratch(sizeof(float) * 5 * width * kBlock)), call.D};
  for (int done = 0; done < piece.length; done += kBlock) {
    const int count = std::min(kBlock, piece.length - done), first = piece.start + done;
    prepare(call, head, first, count, tokens);
    for (int row = rows.first; row < rows.last; row += kGroup) {
      const int64_t at = (row - rows.first) * width;
      walk_group(call, state.source + at, state.target + at, std::min(kGroup, rows.last - row), tokens, count,
                 first, head * width + row);
    }
    state.source = state.target;
  }
}

}  // namespace

void wkv7(const WkvCall& call) {
  const int parts = parts_of_head(call.step.num_segments, call.H, call.D);
  for_pieces(call.step, call.H * parts, [&](const Piece& piece, int item) {
    walk_piece(call, piece, item / parts, rows_of_part(call.D, parts, item % parts));
  });
}

}  // namespace octavo::OCTAVO_ISA
