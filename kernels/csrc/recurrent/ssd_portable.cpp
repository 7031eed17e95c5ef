// State space duality (SSD): one pass over each row of the state per token.
#include "recurrent/loops.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kBlock = 32;  // tokens prepared at once

// Inputs of tokens that all rows of a head use: B and C [Ds each], adjacent in memory.
struct Tokens {
  float* vectors;
  float d[kBlock], decay[kBlock];

  const float* B(int t, int size) const { return vectors + static_cast<int64_t>(2 * t) * size; }
  const float* C(int t, int size) const { return B(t, size) + size; }
};

void prepare(const SsdCall& call, int head, int first, int count, Tokens& tokens) {
  const int64_t at = static_cast<int64_t>(head / (call.H / call.G)) * call.Ds;
  for (int t = 0; t < kBlock; ++t) tokens.d[t] = t < count ? load_one(call.dt, first + t, head) : 0.0f;
  const Vec bias = splat(call.dt_bias[head]), A = exp_lanes(splat(call.A_log[head]));
  const Vec lowest = splat(call.lowest), highest = splat(call.highest);
  for (int t = 0; t < whole_vectors(count); t += kLanes) {
    Vec d = softplus_lanes(load(tokens.d + t) + bias);
    d = d < lowest ? lowest : (d > highest ? highest : d);
    store(tokens.d + t, d);
    store(tokens.decay + t, exp_lanes(-(A * d)));
  }
  for (int t = 0; t < count; ++t) {
    float* const B = tokens.vectors + static_cast<int64_t>(2 * t) * call.Ds;
    load_row(call.B, first + t, at, call.Ds, B);
    load_row(call.C, first + t, at, call.Ds, B + call.Ds);
  }
}

// Applies token t to R rows. `dx`: d x of each row; `out` gets y without D x.
template <int R>
inline void tile(const float* from, float* to, int size, const Tokens& tokens, int t, const float* dx,
                 float* out) {
  Vec acc[kTile]{}, in[R];
  for (int r = 0; r < R; ++r) in[r] = splat(dx[r]);
  const float *const B = tokens.B(t, size), *const C = tokens.C(t, size);
  const Vec decay = splat(tokens.decay[t]);
  for (int i = 0; i < size; i += kLanes) {
    prefetch<R * kLanes>(from + static_cast<int64_t>(R) * i);
    const Vec b = load(B + i), c = load(C + i);
    for (int r = 0; r < R; ++r) {
      const int64_t at = static_cast<int64_t>(r) * size + i;
      const Vec s = fma(in[r], b, load(from + at) * decay);
      store(to + at, s);
      acc[r] = fma(s, c, acc[r]);
    }
  }
  store_sums(acc, out);
}

void walk_group(const SsdCall& call, const float* from, float* to, int rows, const Tokens& tokens, int count,
                int first, int head, int row) {
  const int64_t column = static_cast<int64_t>(head) * call.Dh + row;
  alignas(64) float x[kGroup]{}, dx[kGroup], out[kGroup], y[kGroup];
  for (int t = 0; t < count; ++t) {
    load_row(call.x, first + t, column, rows, x);
    for (int r = 0; r < kGroup; r += kLanes) store(dx + r, load(x + r) * tokens.d[t]);
    for_tiles(rows, [&](auto size, int r) {
      const int64_t at = static_cast<int64_t>(r) * call.Ds;
      tile<size>(from + at, to + at, call.Ds, tokens, t, dx + r, out + r);
    });
    for (int r = 0; r < kGroup; r += kLanes)
      store(y + r, fma(splat(call.D[head]), load(x + r), load(out + r)));
    store_floats(call.y, call.x.type, (static_cast<int64_t>(first) + t) * call.H * call.Dh + column, rows, y);
    from = to;
  }
}

void walk_piece(const SsdCall& call, const Piece& piece, int head, RowRange rows) {
  const int64_t width = call.Ds, size = call.Dh * width;
  HeadRows state(call.pool, piece, call.H * size, head * size + rows.first * width,
                 (rows.last - rows.first) * width);
  Tokens tokens{};
  tokens.vectors = static_cast<float*>(thread_scratch(sizeof(float) * 2 * width * kBlock));
  for (int done = 0; done < piece.length; done += kBlock) {
    const int count = std::min(kBlock, piece.length - done), first = piece.start + done;
    prepare(call, head, first, count, tokens);
    for (int row = rows.first; row < rows.last; row += kGroup) {
      const int64_t at = (row - rows.first) * width;
      walk_group(call, state.source + at, state.target + at, std::min(kGroup, rows.last - row), tokens, count,
                 first, head, row);
    }
    state.source = state.target;
  }
}

}  // namespace

void ssd(const SsdCall& call) {
  const int parts = parts_of_head(call.step.num_segments, call.H, call.Dh);
  for_pieces(call.step, call.H * parts, [&](const Piece& piece, int item) {
    walk_piece(call, piece, item / parts, rows_of_part(call.Dh, parts, item % parts));
  });
}

}  // namespace octavo::OCTAVO_ISA
