// simdgroup_matrix: 8x8, two neighbouring elements of a row per lane. The layout is the one that MLX's
// steel kernels rely on (BaseMMAFrag::get_coord in mlx/backend/metal/kernels/steel/gemm/mma.h).
#pragma once

namespace metal {

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "Metal has 8x8 only");
  vec<T, 2> elements;
  simdgroup_matrix() { __builtin_memset(&elements, 0xFF, sizeof(elements)); }  // uninitialised: NaN
  explicit simdgroup_matrix(T) {
    msl_rt_fail("simdgroup_matrix(T) makes a diagonal: use make_filled_simdgroup_matrix", 0);
  }
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

namespace msl_detail {

struct position {
  int row, column;  // position of the first of a lane's two elements
};
inline position position_of(uint lane) {
  uint quad = lane / 4;
  return {(int)((quad & 4) + (lane / 2) % 4), (int)((quad & 2) * 2 + (lane % 2) * 2)};
}

}  // namespace msl_detail

template <class T, int Rows, int Columns>
METAL_FUNC simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> m;
  m.elements[0] = m.elements[1] = value;
  return m;
}

template <class T, class Pointer>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, Pointer* from, ulong row_stride = 8,
                           ulong2 origin = (ulong2){0, 0}, bool transpose = false,
                           int line = __builtin_LINE()) {
  auto all = msl_rt_gather(&row_stride, sizeof(row_stride), "simdgroup_load", line);
  auto at = msl_detail::position_of(all.lane);
  for (int k = 0; k < 2; ++k) {
    ulong row = transpose ? origin.x + at.column + k : origin.y + at.row;
    ulong column = transpose ? origin.y + at.row : origin.x + at.column + k;
    to.elements[k] = from[row * row_stride + column];
  }
}

template <class T, class Pointer>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> from, Pointer* to, ulong row_stride = 8,
                            ulong2 origin = (ulong2){0, 0}, bool transpose = false,
                            int line = __builtin_LINE()) {
  auto all = msl_rt_gather(&row_stride, sizeof(row_stride), "simdgroup_store", line);
  auto at = msl_detail::position_of(all.lane);
  for (int k = 0; k < 2; ++k) {
    ulong row = transpose ? origin.x + at.column + k : origin.y + at.row;
    ulong column = transpose ? origin.y + at.row : origin.x + at.column + k;
    to[row * row_stride + column] = from.elements[k];
  }
}

// d = a b + c, summed in float
template <class D, class A, class B, class C>
MSL_UNCHECKED inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d,
                                                        simdgroup_matrix<A, 8, 8> a,
                                                        simdgroup_matrix<B, 8, 8> b,
                                                        simdgroup_matrix<C, 8, 8> c,
                                                        int line = __builtin_LINE()) {
  struct operands {
    A a[2];
    B b[2];
  } mine = {{a.elements[0], a.elements[1]}, {b.elements[0], b.elements[1]}};
  auto all = msl_detail::gather<operands>(mine, "simdgroup_multiply_accumulate", line);
  if (all.gathered.active != 0xFFFFFFFFu) msl_rt_fail("simdgroup_matrix operation with inactive lanes", line);
  float left[8][8], right[8][8];
  for (uint lane = 0; lane < 32; ++lane) {
    auto at = msl_detail::position_of(lane);
    operands lanes = all[lane];
    for (int k = 0; k < 2; ++k) {
      left[at.row][at.column + k] = (float)lanes.a[k];
      right[at.row][at.column + k] = (float)lanes.b[k];
    }
  }
  auto at = msl_detail::position_of(all.gathered.lane);
  for (int k = 0; k < 2; ++k) {
    float sum = (float)c.elements[k];
    for (int i = 0; i < 8; ++i) sum += left[at.row][i] * right[i][at.column + k];
    d.elements[k] = (D)sum;
  }
}
template <class D, class A, class B>
MSL_UNCHECKED inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                             simdgroup_matrix<B, 8, 8> b, int line = __builtin_LINE()) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), line);
}

}  // namespace metal
