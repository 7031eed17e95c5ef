// Loops and row counts known at compile time. Templates unroll the loops, because compilers keep sums in
// memory if their index is known only at run time. Internal linkage: see numeric.h.
#pragma once

#include <type_traits>
#include <utility>

namespace octavo {
namespace {

// Calls body(integral constant i) for i in [0, count).
template <int count, class Body>
inline __attribute__((always_inline)) void unrolled(Body&& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, count>());
}

// Calls body(integral constant of `count`) for least <= count <= most <= 6.
template <int most, int least = 1, class Body>
inline void with_rows(int count, Body&& body) {
  if constexpr (most > least) {
    if (count < most) return with_rows<most - 1, least>(count, body);
  }
  body(std::integral_constant<int, most>());
}

}  // namespace
}  // namespace octavo
