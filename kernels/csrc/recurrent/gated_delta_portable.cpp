// The gated delta rule. gk = g k and gq = g q are computed once per token and head, so both products can use
// the state before the token: S k = S_old gk and y = S_old gq + u (k . q). One pass over a row then adds u k'
// for a token and computes both products for the next token.
#include "recurrent/loops.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kBlock = 32;  // tokens prepared at once; they stay in L2 or L1

// Inputs of tokens that all rows of a head use, adjacent: gk, gq, k [Dk each], and g [Dk] if it is a vector.
struct Tokens {
  float* vectors;
  int64_t stride;
  float gate[kBlock], beta[kBlock], kq[kBlock];

  const float* gk(int t) const { return vectors + t * stride; }
  const float* gq(int t, int width) const { return gk(t) + width; }
  const float* k(int t, int width) const { return gk(t) + 2 * width; }
  const float* g(int t, int width) const { return gk(t) + 3 * width; }
};

// Computes `count` decays in place, from the layer's values a and A = exp(A_log).
void decay_lanes(const DeltaCall& call, float* values, const float* A, const float* bias, int count) {
  const auto each = [&](auto function) {
    for (int i = 0; i < count; i += kLanes)
      store(values + i, exp_lanes(function(load(values + i) + load(bias + i), load(A + i))));
  };
  if (call.gates == Gates::softplus) each([](Vec x, Vec a) { return -(a * softplus_lanes(x)); });
  if (call.gates == Gates::bounded)
    each([&](Vec x, Vec a) { return call.lower_bound * sigmoid_lanes(a * x); });
}

// A head's gate parameters as vectors: [Dk] if gates are vectors, else [kBlock] copies of the head's own.
struct GateParameters {
  float A[kBlock > 256 ? kBlock : 256], bias[kBlock > 256 ? kBlock : 256];
};

GateParameters gate_parameters(const DeltaCall& call, int head) {
  GateParameters result;
  if (call.gates == Gates::ready) return result;
  const int count = call.vector_gate ? call.Dk : kBlock;
  for (int i = 0; i < count; ++i) {
    result.A[i] = call.wide_A ? call.A_log[static_cast<int64_t>(head) * call.Dk + i] : call.A_log[head];
    result.bias[i] =
        call.vector_gate ? call.dt_bias[static_cast<int64_t>(head) * call.Dk + i] : call.dt_bias[head];
  }
  map_lanes(result.A, count, exp_lanes);
  return result;
}

// Computes betas and, unless gates are vectors, gates of `count` tokens.
void load_gates(const DeltaCall& call, const GateParameters& parameters, int head, int first, int count,
                Tokens& tokens) {
  for (int t = 0; t < kBlock; ++t) {
    tokens.beta[t] = t < count ? load_one(call.b, first + t, head) : 0.0f;
    if (!call.vector_gate) tokens.gate[t] = t < count ? load_one(call.a, first + t, head) : 0.0f;
  }
  const int padded = whole_vectors(count);
  if (!call.vector_gate) decay_lanes(call, tokens.gate, parameters.A, parameters.bias, padded);
  if (call.gates != Gates::ready)
    map_lanes(tokens.beta, padded, [&](Vec x) { return sigmoid_lanes(x) * call.beta_scale; });
}

template <bool kVectorGate>
void prepare(const DeltaCall& call, const GateParameters& parameters, int head, int first, int count,
             Tokens& tokens) {
  load_gates(call, parameters, head, first, count, tokens);
  const int width = call.Dk;
  const int64_t at = static_cast<int64_t>(head / (call.Hv / call.Hk)) * width;
  for (int t = 0; t < count; ++t) {
    float* const gk = tokens.vectors + t * tokens.stride;
    float *const gq = gk + width, *const k = gq + width, *const g = k + width;
    load_row(call.q, first + t, at, width, gq);
    load_row(call.k, first + t, at, width, k);
    if constexpr (kVectorGate) {
      load_row(call.a, first + t, static_cast<int64_t>(head) * width, width, g);
      decay_lanes(call, g, parameters.A, parameters.bias, width);
    }
    Vec dot{};
    for (int i = 0; i < width; i += kLanes) {
      const Vec q = load(gq + i), key = load(k + i);
      const Vec gate = kVectorGate ? load(g + i) : splat(tokens.gate[t]);
      store(gk + i, gate * key);
      store(gq + i, gate * q);
      dot = fma(key, q, dot);
    }
    tokens.kq[t] = sum(dot);
  }
}

// For kGroup rows: the products S k and S q, both with the gate, and u.
struct GroupSums {
  float kv[kGroup], out[kGroup], u[kGroup];
};

// Computes both products of the first token with R rows that are not updated yet. To keep memory busy, this
// function and the token's update each prefetch half of R later rows.
template <int R>
inline void read_tile(const float* state, int width, const Tokens& tokens, int row, GroupSums& group) {
  Vec a[kTile]{}, b[kTile]{};
  const float *const gk = tokens.gk(0), *const gq = tokens.gq(0, width);
  for (int i = 0; i < width; i += kLanes) {
    prefetch<R * kLanes / 2>(state + static_cast<int64_t>(R) * i / 2);
    const Vec x = load(gk + i), z = load(gq + i);
    for (int r = 0; r < R; ++r) {
      const Vec s = load(state + static_cast<int64_t>(r) * width + i);
      a[r] = fma(s, x, a[r]);
      b[r] = fma(s, z, b[r]);
    }
  }
  store_sums(a, group.kv + row), store_sums(b, group.out + row);
}

// Computes S = S g + u k' of token t for R rows, from `from` to `to`. With kNext, also computes both products
// of token t + 1.
template <int R, bool kVectorGate, bool kNext>
inline void update_tile(const float* from, float* to, int width, const Tokens& tokens, int t, int row,
                        GroupSums& group) {
  Vec a[kTile]{}, b[kTile]{}, u[R];
  for (int r = 0; r < R; ++r) u[r] = splat(group.u[row + r]);
  const float *const k = tokens.k(t, width), *const g = tokens.g(t, width);
  const float *const gk = tokens.gk(t + 1), *const gq = tokens.gq(t + 1, width);
  const Vec scalar = splat(tokens.gate[t]);
  const float* const later = from + static_cast<int64_t>(R) * width / 2;
  for (int i = 0; i < width; i += kLanes) {
    const Vec key = load(k + i), gate = kVectorGate ? load(g + i) : scalar;
    Vec x{}, z{};
    if constexpr (kNext) x = load(gk + i), z = load(gq + i);
    if (t == 0) prefetch<R * kLanes / 2>(later + static_cast<int64_t>(R) * i / 2);
    for (int r = 0; r < R; ++r) {
      const int64_t at = static_cast<int64_t>(r) * width + i;
      const Vec s = fma(u[r], key, load(from + at) * gate);
      store(to + at, s);
      if constexpr (kNext) a[r] = fma(s, x, a[r]), b[r] = fma(s, z, b[r]);
    }
  }
  if constexpr (kNext) store_sums(a, group.kv + row), store_sums(b, group.out + row);
}

// Applies `count` tokens to at most kGroup rows [row, row + rows) of a head. v and y point to the first
// token.
template <bool kVectorGate>
void walk_group(const DeltaCall& call, const float* from, float* to, int rows, const Tokens& tokens,
                int count, int first, int64_t column) {
  const int width = call.Dk;
  GroupSums group{};
  for_tiles(rows, [&](auto size, int row) {
    read_tile<size>(from + static_cast<int64_t>(row) * width, width, tokens, row, group);
  });
  alignas(64) float v[kGroup]{}, y[kGroup];
  for (int t = 0; t < count; ++t) {
    load_row(call.v, first + t, column, rows, v);
    for (int r = 0; r < kGroup; r += kLanes) {
      const Vec u = (load(v + r) - load(group.kv + r)) * tokens.beta[t];
      store(group.u + r, u);
      store(y + r, fma(u, splat(tokens.kq[t]), load(group.out + r)));
    }
    const int64_t out = (static_cast<int64_t>(first) + t) * call.Hv * call.Dv + column;
    store_floats(call.y, call.v.type, out, rows, y);
    for_tiles(rows, [&](auto size, int row) {
      const int64_t at = static_cast<int64_t>(row) * width;
      if (t + 1 < count)
        update_tile<size, kVectorGate, true>(from + at, to + at, width, tokens, t, row, group);
      else update_tile<size, kVectorGate, false>(from + at, to + at, width, tokens, t, row, group);
    });
    from = to;
  }
}

template <bool kVectorGate>
void walk_piece(const DeltaCall& call, const Piece& piece, int head, RowRange rows) {
  const int64_t width = call.Dk, size = call.Dv * width;
  HeadRows state(call.pool, piece, call.Hv * size, head * size + rows.first * width,
                 (rows.last - rows.first) * width);
  if (piece.length == 0) return;
  const GateParameters parameters = gate_parameters(call, head);
  Tokens tokens{};
  tokens.stride = width * (kVectorGate ? 4 : 3);
  tokens.vectors = static_cast<float*>(thread_scratch(sizeof(float) * tokens.stride * kBlock));
  for (int done = 0; done < piece.length; done += kBlock) {
    const int count = std::min(kBlock, piece.length - done), first = piece.start + done;
    prepare<kVectorGate>(call, parameters, head, first, count, tokens);
    for (int row = rows.first; row < rows.last; row += kGroup) {
      const int num_rows = std::min(kGroup, rows.last - row);
      const int64_t at = (row - rows.first) * width;
      walk_group<kVectorGate>(call, state.source + at, state.target + at, num_rows, tokens, count, first,
                              static_cast<int64_t>(head) * call.Dv + row);
    }
    state.source = state.target;
  }
}

}  // namespace

void gated_delta(const DeltaCall& call) {
  const int parts = parts_of_head(call.step.num_segments, call.Hv, call.Dv);
  for_pieces(call.step, call.Hv * parts, [&](const Piece& piece, int item) {
    const RowRange rows = rows_of_part(call.Dv, parts, item % parts);
    if (call.vector_gate) walk_piece<true>(call, piece, item / parts, rows);
    else walk_piece<false>(call, piece, item / parts, rows);
  });
}

}  // namespace octavo::OCTAVO_ISA
