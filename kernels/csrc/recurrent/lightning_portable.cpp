// Lightning attention. The state has a row for each key dim, as in mlx-lm, so a token's output is a sum over
// rows. Several tokens are applied to a few columns at a time, which stay in L1; a single token is applied
// row by row, in memory order. In both ways, a column is added up in the same order.
#include "recurrent/loops.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kColumns = 16;  // columns computed together
constexpr int kBlock = 32;    // tokens prepared at once

// Updates kColumns columns of a head's state, token by token. qk has the scaled q and the k of each token.
void walk_columns(const LightningCall& call, const float* from, float* to, Vec decay, const float* qk,
                  int count, int first, int64_t column) {
  constexpr int kVectors = kColumns / kLanes;
  alignas(64) float v[kColumns], y[kColumns];
  for (int t = 0; t < count; ++t) {
    load_row(call.v, first + t, column, kColumns, v);
    const float *const q = qk + static_cast<int64_t>(2 * t) * call.Dk, *const k = q + call.Dk;
    Vec in[kVectors], acc[2][kVectors]{};  // two independent sums, of even and of odd rows
    for (int i = 0; i < kVectors; ++i) in[i] = load(v + i * kLanes);
    for (int row = 0; row < call.Dk; row += 2)
      for (int odd = 0; odd < 2; ++odd) {
        const int64_t at = static_cast<int64_t>(row + odd) * call.Dv;
        const Vec key = splat(k[row + odd]), query = splat(q[row + odd]);
        __builtin_prefetch(from + at + 8 * call.Dv, 0, 3);
        for (int i = 0; i < kVectors; ++i) {
          const Vec s = fma(key, in[i], load(from + at + i * kLanes) * decay);
          store(to + at + i * kLanes, s);
          acc[odd][i] = fma(query, s, acc[odd][i]);
        }
      }
    for (int i = 0; i < kVectors; ++i) store(y + i * kLanes, acc[0][i] + acc[1][i]);
    store_floats(call.y, call.v.type, (static_cast<int64_t>(first) + t) * call.H * call.Dv + column, kColumns,
                 y);
    from = to;
  }
}

// Applies one token to rows [row, row + R) of a head's state. acc [2][Dv]: sums over even and over odd rows.
template <int R>
inline void walk_rows(const LightningCall& call, const float* from, float* to, Vec decay, const float* qk,
                      const float* v, int row, float* acc) {
  Vec query[R], key[R];
  for (int r = 0; r < R; ++r) query[r] = splat(qk[row + r]), key[r] = splat(qk[call.Dk + row + r]);
  const int64_t at = static_cast<int64_t>(row) * call.Dv;
  for (int i = 0; i < call.Dv; i += kLanes) {
    prefetch<R * kLanes>(from + at + static_cast<int64_t>(R) * i);
    const Vec in = load(v + i);
    Vec sums[2] = {load(acc + i), load(acc + call.Dv + i)};
    for (int r = 0; r < R; ++r) {
      const int64_t place = at + static_cast<int64_t>(r) * call.Dv + i;
      const Vec s = fma(key[r], in, load(from + place) * decay);
      store(to + place, s);
      sums[r % 2] = fma(query[r], s, sums[r % 2]);
    }
    store(acc + i, sums[0]), store(acc + call.Dv + i, sums[1]);
  }
}

// Applies a single token to a head. `scratch`: memory for three rows of Dv floats.
void walk_one(const LightningCall& call, const float* from, float* to, Vec decay, const float* qk, int token,
              int64_t column, float* scratch) {
  float *const v = scratch, *const acc = v + call.Dv;
  load_row(call.v, token, column, call.Dv, v);
  std::memset(acc, 0, sizeof(float) * 2 * call.Dv);
  int row = 0;
  for (; row + 4 <= call.Dk; row += 4) walk_rows<4>(call, from, to, decay, qk, v, row, acc);
  for (; row < call.Dk; row += 2) walk_rows<2>(call, from, to, decay, qk, v, row, acc);
  for (int i = 0; i < call.Dv; i += kLanes) store(acc + i, load(acc + i) + load(acc + call.Dv + i));
  store_floats(call.y, call.v.type, static_cast<int64_t>(token) * call.H * call.Dv + column, call.Dv, acc);
}

void prepare(const LightningCall& call, int head, int first, int count, float* qk) {
  const int64_t at = static_cast<int64_t>(head) * call.Dk;
  for (int t = 0; t < count; ++t, qk += 2 * call.Dk) {
    load_row(call.q, first + t, at, call.Dk, qk);
    for (int i = 0; i < call.Dk; ++i) qk[i] *= call.scale;
    load_row(call.k, first + t, at, call.Dk, qk + call.Dk);
  }
}

}  // namespace

void lightning(const LightningCall& call) {
  for_pieces(call.step, call.H, [&](const Piece& piece, int head) {
    const int64_t size = static_cast<int64_t>(call.Dk) * call.Dv;
    HeadRows state(call.pool, piece, call.H * size, head * size, size);
    const int64_t vectors = 2 * static_cast<int64_t>(call.Dk) * kBlock;
    float* const qk =
        static_cast<float*>(thread_scratch(sizeof(float) * (vectors + 3 * static_cast<int64_t>(call.Dv))));
    const Vec decay = exp_lanes(splat(call.log_decay[head]));
    for (int done = 0; done < piece.length; done += kBlock) {
      const int count = std::min(kBlock, piece.length - done), first = piece.start + done;
      prepare(call, head, first, count, qk);
      const int64_t column = static_cast<int64_t>(head) * call.Dv;
      if (count == 1) walk_one(call, state.source, state.target, decay, qk, first, column, qk + vectors);
      else
        for (int at = 0; at < call.Dv; at += kColumns)
          walk_columns(call, state.source + at, state.target + at, decay, qk, count, first, column + at);
      state.source = state.target;
    }
  });
}

}  // namespace octavo::OCTAVO_ISA
