// Atomics, relaxed like Metal's. Plain accesses are atomic here, because fibers never preempt each other.
#pragma once

namespace metal {

enum memory_order { memory_order_relaxed = 0 };
template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

#define MSL_ATOMIC(NAME, EXPRESSION)                                   \
  template <class Atomic, class U>                                     \
  MSL_UNCHECKED inline auto NAME(Atomic* p, U operand, memory_order) { \
    typedef __remove_cv(__typeof__(+p->value)) T;                      \
    T x = (T)operand;                                                  \
    msl_rt_atomic((const void*)p, sizeof(p->value));                   \
    T old = p->value;                                                  \
    p->value = EXPRESSION;                                             \
    return old;                                                        \
  }
MSL_ATOMIC(atomic_fetch_add_explicit, old + x)
MSL_ATOMIC(atomic_fetch_sub_explicit, old - x)
MSL_ATOMIC(atomic_fetch_max_explicit, old > x ? old : x)
MSL_ATOMIC(atomic_fetch_min_explicit, old < x ? old : x)
MSL_ATOMIC(atomic_fetch_and_explicit, old & x)
MSL_ATOMIC(atomic_fetch_or_explicit, old | x)
MSL_ATOMIC(atomic_fetch_xor_explicit, old ^ x)
MSL_ATOMIC(atomic_exchange_explicit, x)

template <class Atomic, class U>
MSL_UNCHECKED inline void atomic_store_explicit(Atomic* p, U value, memory_order) {
  msl_rt_atomic((const void*)p, sizeof(p->value));
  p->value = value;
}
template <class Atomic>
MSL_UNCHECKED inline auto atomic_load_explicit(Atomic* p, memory_order) {
  typedef __remove_cv(__typeof__(+p->value)) T;
  msl_rt_atomic((const void*)p, sizeof(p->value));
  return (T)p->value;
}
template <class Atomic, class U>
MSL_UNCHECKED inline bool atomic_compare_exchange_weak_explicit(Atomic* p, thread U* expected, U desired,
                                                                memory_order, memory_order) {
  msl_rt_atomic((const void*)p, sizeof(p->value));
  if (p->value == *expected) {
    p->value = desired;
    return true;
  }
  *expected = p->value;
  return false;
}

}  // namespace metal
