// The emulator's Metal for clang's amdgcn target. The language is equal; a thread is a lane of a wave.
// Operations between lanes are GPU instructions. This code never runs; it is compiled to learn the compiler's
// registers, scratch memory and instructions. Matrix operations are opaque uses of the registers they need.
#pragma once
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;

extern "C" void* msl_rt_threadgroup_memory(const char* name, uint32_t size, int line);  // not called here

#include "../shim/msl_types.h"

#include "../shim/msl_keywords.h"

#include "../shim/msl_math.h"

#undef MSL_THREADGROUP
#define MSL_THREADGROUP(NAME) \
  static MSL_LOCAL __attribute__((loader_uninitialized)) msl_type_##NAME NAME

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

METAL_FUNC uint msl_lane() { return __builtin_amdgcn_mbcnt_lo(~0u, 0u); }
METAL_FUNC void threadgroup_barrier(mem_flags) {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup");
}
METAL_FUNC void simdgroup_barrier(mem_flags flags) {
  if (flags != mem_flags::mem_none) __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_sched_barrier(0);
}

template <class T>
METAL_FUNC T from_lane(T x, int lane) {
  int bits = 0, got;
  __builtin_memcpy(&bits, &x, sizeof(T));
  got = __builtin_amdgcn_ds_bpermute(lane << 2, bits);
  __builtin_memcpy(&x, &got, sizeof(T));
  return x;
}
template <class T>
METAL_FUNC T from_xor(T x, uint mask) {
  int bits = 0, got = 0;
  __builtin_memcpy(&bits, &x, sizeof(T));
  switch (mask) {  // a constant, once inlined
    case 1: got = __builtin_amdgcn_ds_swizzle(bits, 0x041F); break;
    case 2: got = __builtin_amdgcn_ds_swizzle(bits, 0x081F); break;
    case 4: got = __builtin_amdgcn_ds_swizzle(bits, 0x101F); break;
    case 8: got = __builtin_amdgcn_ds_swizzle(bits, 0x201F); break;
    case 16: got = __builtin_amdgcn_ds_swizzle(bits, 0x401F); break;
    default: got = __builtin_amdgcn_ds_bpermute((int)((msl_lane() ^ mask) << 2), bits);
  }
  __builtin_memcpy(&x, &got, sizeof(T));
  return x;
}
template <class T>
METAL_FUNC T simd_shuffle(T x, ushort lane) {
  return from_lane(x, lane);
}
template <class T>
METAL_FUNC T simd_broadcast(T x, ushort lane) {
  return from_lane(x, lane);
}
template <class T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask) {
  return from_xor(x, mask);
}
template <class T>
METAL_FUNC T simd_shuffle_down(T x, ushort delta) {
  return from_lane(x, (int)(msl_lane() + delta));
}
template <class T>
METAL_FUNC T simd_shuffle_up(T x, ushort delta) {
  return from_lane(x, (int)(msl_lane() - delta));
}
#define MSL_REDUCTION(NAME, EXPRESSION)                        \
  template <class T>                                           \
  METAL_FUNC T NAME(T a) {                                     \
    for (uint step = 16; step; step >>= 1) {                   \
      T b = from_xor(a, step);                                 \
      a = EXPRESSION;                                          \
    }                                                          \
    return a;                                                  \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_max, metal::max(a, b))
MSL_REDUCTION(simd_min, metal::min(a, b))
METAL_FUNC bool simd_any(bool x) { return __builtin_amdgcn_ballot_w32(x) != 0; }
METAL_FUNC bool simd_all(bool x) { return __builtin_amdgcn_ballot_w32(!x) == 0; }

template <class T, int Rows, int Columns>
struct simdgroup_matrix {
  vec<T, 2> elements;
  METAL_FUNC simdgroup_matrix() {}
  METAL_FUNC vec<T, 2>& thread_elements() { return elements; }
  METAL_FUNC const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Rows, int Columns>
METAL_FUNC simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> m;
  m.elements[0] = m.elements[1] = value;
  return m;
}
METAL_FUNC uint matrix_at(uint row_stride, bool transpose) {
  const uint lane = msl_lane(), quad = lane / 4;
  const uint row = (quad & 4) + (lane / 2) % 4, column = (quad & 2) * 2 + (lane % 2) * 2;
  return transpose ? column * row_stride + row : row * row_stride + column;
}
template <class T, class Pointer>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, Pointer* from, ulong row_stride = 8,
                               ulong2 = (ulong2){0, 0}, bool transpose = false) {
  const uint at = matrix_at((uint)row_stride, transpose);
  to.elements[0] = from[at];
  to.elements[1] = from[at + (transpose ? (uint)row_stride : 1u)];
}
template <class T, class Pointer>
METAL_FUNC void simdgroup_store(simdgroup_matrix<T, 8, 8> from, Pointer* to, ulong row_stride = 8,
                                ulong2 = (ulong2){0, 0}, bool transpose = false) {
  const uint at = matrix_at((uint)row_stride, transpose);
  to[at] = from.elements[0];
  to[at + (transpose ? (uint)row_stride : 1u)] = from.elements[1];
}
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  vec<float, 2> sum = {(float)c.elements[0], (float)c.elements[1]};
  __asm__("v_nop ; mma %0 %1 %2" : "+v"(sum) : "v"(a.elements), "v"(b.elements));
  d.elements[0] = (D)sum[0];
  d.elements[1] = (D)sum[1];
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}

}  // namespace metal

using namespace metal;
typedef bfloat bfloat16_t;
typedef half float16_t;
