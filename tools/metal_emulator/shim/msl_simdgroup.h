// Barriers, and operations between the 32 lanes of a simdgroup. In the runtime, all lanes wait for each other
// at each operation. If a lane reaches another operation or ends, that is an error.
#pragma once

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }

MSL_UNCHECKED inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  msl_rt_barrier(0, (uint)flags, line);
}
MSL_UNCHECKED inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  msl_rt_barrier(1, (uint)flags, line);
}

namespace msl_detail {

template <class T>
struct lanes {
  MslGather gathered;
  MSL_UNCHECKED T operator[](uint i) const {
    T value;
    __builtin_memcpy(&value, gathered.data + kMslGatherStride * i, sizeof(T));
    return value;
  }
  MSL_UNCHECKED bool has(int i) const { return i >= 0 && i < 32 && ((gathered.active >> i) & 1); }
  MSL_UNCHECKED int me() const { return (int)gathered.lane; }
};

template <class T>
MSL_UNCHECKED inline lanes<T> gather(T value, const char* operation, int line) {
  static_assert(sizeof(T) <= kMslGatherStride, "too large to exchange");
  return {msl_rt_gather(&value, sizeof(T), operation, line)};
}

// Returns the value of an undefined result: NaN, or all bits set.
template <class T>
MSL_UNCHECKED inline T poison() {
  T value;
  __builtin_memset(&value, 0xFF, sizeof(T));
  return value;
}

template <class T>
MSL_UNCHECKED inline T lane_or_poison(const lanes<T>& all, int i) {
  return all.has(i) ? all[i] : poison<T>();
}

// Reduces the active lanes as a tree; every lane gets the same value. Apple documents no order of sums.
template <class T, class F>
MSL_UNCHECKED inline T reduce(const lanes<T>& all, F f) {
  T value[32];
  bool has[32];
  for (uint i = 0; i < 32; ++i) {
    has[i] = all.has(i);
    if (has[i]) value[i] = all[i];
  }
  for (uint step = 16; step; step >>= 1) {
    for (uint i = 0; i < step; ++i) {
      if (!has[i + step]) continue;
      value[i] = has[i] ? f(value[i], value[i + step]) : value[i + step];
      has[i] = true;
    }
  }
  return value[0];
}

// Returns the sum of the lanes in [begin, end).
template <class T>
MSL_UNCHECKED inline T sum_lanes(const lanes<T>& all, int begin, int end) {
  T result = T(0);
  for (int i = begin; i < end; ++i) {
    if (all.has(i)) result = result + all[i];
  }
  return result;
}

}  // namespace msl_detail

#define MSL_REDUCTION(NAME, EXPRESSION)                                                        \
  template <class T>                                                                           \
  MSL_UNCHECKED inline T NAME(T x, int line = __builtin_LINE()) {                              \
    auto all = msl_detail::gather<T>(x, #NAME, line);                                          \
    return msl_detail::reduce<T>(all, [](T a, T b) MSL_UNCHECKED -> T { return EXPRESSION; }); \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a * b)
MSL_REDUCTION(simd_max, metal::max(a, b))
MSL_REDUCTION(simd_min, metal::min(a, b))
MSL_REDUCTION(simd_and, a & b)
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_xor, a ^ b)

#define MSL_SHUFFLE(NAME, ARGUMENT, SOURCE)                                        \
  template <class T>                                                               \
  MSL_UNCHECKED inline T NAME(T x, ushort ARGUMENT, int line = __builtin_LINE()) { \
    auto all = msl_detail::gather<T>(x, #NAME, line);                              \
    int me = all.me();                                                             \
    (void)me;                                                                      \
    return msl_detail::lane_or_poison<T>(all, SOURCE);                             \
  }
MSL_SHUFFLE(simd_shuffle, lane, (int)lane)
MSL_SHUFFLE(simd_broadcast, lane, (int)lane)
MSL_SHUFFLE(simd_shuffle_xor, mask, me ^ (int)mask)
MSL_SHUFFLE(simd_shuffle_down, delta, me + (int)delta)
MSL_SHUFFLE(simd_shuffle_up, delta, me - (int)delta)
MSL_SHUFFLE(simd_shuffle_rotate_down, delta, (me + (int)delta) & 31)
MSL_SHUFFLE(simd_shuffle_rotate_up, delta, (me - (int)delta) & 31)
MSL_SHUFFLE(quad_shuffle, lane, (me & ~3) + (int)lane)
MSL_SHUFFLE(quad_broadcast, lane, (me & ~3) + (int)lane)
MSL_SHUFFLE(quad_shuffle_xor, mask, (me & ~3) + ((me ^ (int)mask) & 3))

template <class T>
MSL_UNCHECKED inline T simd_shuffle_and_fill_up(T x, T fill, ushort delta, int line = __builtin_LINE()) {
  struct both {
    T x, fill;
  };
  auto all = msl_detail::gather<both>({x, fill}, "simd_shuffle_and_fill_up", line);
  int source = all.me() - (int)delta;
  return source >= 0 ? all[source].x : all[32 + source].fill;
}
template <class T>
MSL_UNCHECKED inline T simd_broadcast_first(T x, int line = __builtin_LINE()) {
  auto all = msl_detail::gather<T>(x, "simd_broadcast_first", line);
  return all[__builtin_ctz(all.gathered.active)];
}
template <class T>
MSL_UNCHECKED inline T simd_prefix_inclusive_sum(T x, int line = __builtin_LINE()) {
  auto all = msl_detail::gather<T>(x, "simd_prefix_inclusive_sum", line);
  return msl_detail::sum_lanes<T>(all, 0, all.me() + 1);
}
template <class T>
MSL_UNCHECKED inline T simd_prefix_exclusive_sum(T x, int line = __builtin_LINE()) {
  auto all = msl_detail::gather<T>(x, "simd_prefix_exclusive_sum", line);
  return msl_detail::sum_lanes<T>(all, 0, all.me());
}
template <class T>
MSL_UNCHECKED inline T quad_sum(T x, int line = __builtin_LINE()) {
  auto all = msl_detail::gather<T>(x, "quad_sum", line);
  int first = all.me() & ~3;
  return msl_detail::sum_lanes<T>(all, first, first + 4);
}
template <class T>
MSL_UNCHECKED inline T quad_max(T x, int line = __builtin_LINE()) {
  auto all = msl_detail::gather<T>(x, "quad_max", line);
  int first = all.me() & ~3;
  T result = x;
  for (int i = first; i < first + 4; ++i) {
    if (all.has(i)) result = metal::max(result, all[i]);
  }
  return result;
}

struct simd_vote {
  ulong mask;
  operator ulong() const { return mask; }
  bool any() const { return mask != 0; }
};
MSL_UNCHECKED inline simd_vote simd_ballot(bool x, int line = __builtin_LINE()) {
  auto all = msl_detail::gather<bool>(x, "simd_ballot", line);
  ulong mask = 0;
  for (uint i = 0; i < 32; ++i) {
    if (all.has(i) && all[i]) mask |= 1ul << i;
  }
  return {mask};
}
MSL_UNCHECKED inline bool simd_any(bool x, int line = __builtin_LINE()) {
  auto all = msl_detail::gather<bool>(x, "simd_any", line);
  for (uint i = 0; i < 32; ++i) {
    if (all.has(i) && all[i]) return true;
  }
  return false;
}
MSL_UNCHECKED inline bool simd_all(bool x, int line = __builtin_LINE()) {
  auto all = msl_detail::gather<bool>(x, "simd_all", line);
  for (uint i = 0; i < 32; ++i) {
    if (all.has(i) && !all[i]) return false;
  }
  return true;
}

}  // namespace metal
