// Scalars, vectors with swizzles and constructors, and the type traits that Metal's library offers.
#pragma once

#define __METAL_VERSION__ 310
#define __METAL__ 1
#define MSL_EMULATED 1
#define METAL_FUNC inline __attribute__((always_inline))
// Marks code of the emulator, which is not checked.
#define MSL_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))

typedef _Float16 half;
typedef __bf16 bfloat;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

constexpr half operator""h(long double v) { return (half)v; }
constexpr bfloat operator"" bf(long double v) { return (bfloat)(float)v; }

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define MSL_VECTORS(T)                                \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
#undef MSL_VECTORS

// ---- traits ---------------------------------------------------------------------------------------------

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  typedef T value_type;
  constexpr operator T() const { return v; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;

template <bool B, class A, class C>
struct conditional {
  typedef A type;
};
template <class A, class C>
struct conditional<false, A, C> {
  typedef C type;
};
template <bool B, class A, class C>
using conditional_t = typename conditional<B, A, C>::type;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;

template <class T>
struct remove_cv {
  typedef __remove_cv(T) type;
};
template <class T>
using remove_cv_t = __remove_cv(T);
template <class T>
struct remove_reference {
  typedef __remove_reference_t(T) type;
};
template <class T>
using remove_reference_t = __remove_reference_t(T);

template <class T>
constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T>
struct is_floating_point : integral_constant<bool, is_floating_point_v<T>> {};
template <class T>
constexpr bool is_integral_v = __is_integral(T);
template <class T>
struct is_integral : integral_constant<bool, is_integral_v<T>> {};
template <class A, class B>
constexpr bool is_convertible_v = __is_convertible(A, B);
template <class A, class B>
struct is_convertible : integral_constant<bool, is_convertible_v<A, B>> {};
template <class T>
constexpr bool is_unsigned_v = __is_unsigned(T);
template <class T>
constexpr bool is_signed_v = __is_signed(T);

namespace msl_detail {

template <class V>
struct components {
  typedef V element;
  static constexpr int count = 1;
  static constexpr bool is_vector = false;
};
template <class T, int N>
struct components<T __attribute__((ext_vector_type(N)))> {
  typedef T element;
  static constexpr int count = N;
  static constexpr bool is_vector = true;
};
template <class V>
constexpr bool is_vector_v = components<V>::is_vector;
template <class... A>
constexpr int total_components() {
  return (0 + ... + components<A>::count);
}

// Takes the argument by value, because it may be in any address space.
template <class V, class A>
METAL_FUNC void append(V& result, int& position, A a) {
  typedef typename components<V>::element E;
  if constexpr (is_vector_v<A>) {
    for (int i = 0; i < components<A>::count; ++i) result[position++] = (E)a[i];
  } else {
    result[position++] = (E)a;
  }
}

}  // namespace msl_detail

// Metal's constructors of vectors, which clang lacks: of no argument, one scalar, or all components.
template <class V, class... A>
METAL_FUNC V msl_make(A... a) {
  using namespace msl_detail;
  typedef typename components<V>::element E;
  constexpr int N = components<V>::count;
  if constexpr (!is_vector_v<V>) {
    return V(a...);
  } else if constexpr (sizeof...(A) == 0) {
    return V(0);
  } else if constexpr (total_components<A...>() == 1) {
    V result;
    for (int i = 0; i < N; ++i) result[i] = (E)((a), ...);
    return result;
  } else {
    static_assert(total_components<A...>() == N, "vector constructor: wrong number of components");
    V result;
    int position = 0;
    (msl_detail::append<V>(result, position, a), ...);
    return result;
  }
}

// ---- limits ---------------------------------------------------------------------------------------------

template <class T>
struct numeric_limits;
#define MSL_INTEGER_LIMITS(T, LOWEST, HIGHEST)     \
  template <>                                      \
  struct numeric_limits<T> {                       \
    static constexpr T max() { return HIGHEST; }   \
    static constexpr T min() { return LOWEST; }    \
    static constexpr T lowest() { return LOWEST; } \
  };
MSL_INTEGER_LIMITS(char, -128, 127)
MSL_INTEGER_LIMITS(signed char, -128, 127)
MSL_INTEGER_LIMITS(uchar, 0, 255)
MSL_INTEGER_LIMITS(short, -32768, 32767)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(int, -2147483647 - 1, 2147483647)
MSL_INTEGER_LIMITS(uint, 0, 4294967295u)
MSL_INTEGER_LIMITS(long, -9223372036854775807L - 1, 9223372036854775807L)
MSL_INTEGER_LIMITS(ulong, 0, 18446744073709551615ul)
#undef MSL_INTEGER_LIMITS

#define MSL_FLOAT_LIMITS(T, HIGHEST, SMALLEST, EPSILON)              \
  template <>                                                        \
  struct numeric_limits<T> {                                         \
    static constexpr T max() { return (T)HIGHEST; }                  \
    static constexpr T min() { return (T)SMALLEST; }                 \
    static constexpr T lowest() { return (T)(-HIGHEST); }            \
    static constexpr T infinity() { return (T)__builtin_inff(); }    \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
    static constexpr T epsilon() { return (T)EPSILON; }              \
  };
MSL_FLOAT_LIMITS(float, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__)
MSL_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-05f, 0.0009765625f)
MSL_FLOAT_LIMITS(bfloat, 3.38953139e38f, 1.17549435e-38f, 0.0078125f)
#undef MSL_FLOAT_LIMITS

}  // namespace metal

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define M_PI_F 3.14159274101257f
#define M_LOG2E_F 1.44269504f
#define M_LN2_F 0.69314718f
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
