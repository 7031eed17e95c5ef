// Metal's keywords as macros, and its vector types as constructors: `float4(a, b)` is a macro with
// arguments, `float4 v` is not.
#pragma once

#ifdef MSL_NUMBERED  // for lint.py: with numbers, the IR shows every cast between address spaces
#define MSL_DEVICE __attribute__((address_space(1)))
#define MSL_CONSTANT __attribute__((address_space(2)))
#define MSL_LOCAL __attribute__((address_space(3)))
#else
#define MSL_DEVICE __attribute__((opencl_global))
#define MSL_CONSTANT __attribute__((opencl_constant))
#define MSL_LOCAL __attribute__((opencl_local))
#endif
#define device MSL_DEVICE
#define threadgroup MSL_LOCAL
#define constant const MSL_CONSTANT
#define thread
#define kernel

#define float2(...) msl_make<metal::float2>(__VA_ARGS__)
#define float3(...) msl_make<metal::float3>(__VA_ARGS__)
#define float4(...) msl_make<metal::float4>(__VA_ARGS__)
#define half2(...) msl_make<metal::half2>(__VA_ARGS__)
#define half3(...) msl_make<metal::half3>(__VA_ARGS__)
#define half4(...) msl_make<metal::half4>(__VA_ARGS__)
#define bfloat2(...) msl_make<metal::bfloat2>(__VA_ARGS__)
#define bfloat3(...) msl_make<metal::bfloat3>(__VA_ARGS__)
#define bfloat4(...) msl_make<metal::bfloat4>(__VA_ARGS__)
#define char2(...) msl_make<metal::char2>(__VA_ARGS__)
#define char3(...) msl_make<metal::char3>(__VA_ARGS__)
#define char4(...) msl_make<metal::char4>(__VA_ARGS__)
#define uchar2(...) msl_make<metal::uchar2>(__VA_ARGS__)
#define uchar3(...) msl_make<metal::uchar3>(__VA_ARGS__)
#define uchar4(...) msl_make<metal::uchar4>(__VA_ARGS__)
#define short2(...) msl_make<metal::short2>(__VA_ARGS__)
#define short3(...) msl_make<metal::short3>(__VA_ARGS__)
#define short4(...) msl_make<metal::short4>(__VA_ARGS__)
#define ushort2(...) msl_make<metal::ushort2>(__VA_ARGS__)
#define ushort3(...) msl_make<metal::ushort3>(__VA_ARGS__)
#define ushort4(...) msl_make<metal::ushort4>(__VA_ARGS__)
#define int2(...) msl_make<metal::int2>(__VA_ARGS__)
#define int3(...) msl_make<metal::int3>(__VA_ARGS__)
#define int4(...) msl_make<metal::int4>(__VA_ARGS__)
#define uint2(...) msl_make<metal::uint2>(__VA_ARGS__)
#define uint3(...) msl_make<metal::uint3>(__VA_ARGS__)
#define uint4(...) msl_make<metal::uint4>(__VA_ARGS__)
#define long2(...) msl_make<metal::long2>(__VA_ARGS__)
#define long3(...) msl_make<metal::long3>(__VA_ARGS__)
#define long4(...) msl_make<metal::long4>(__VA_ARGS__)
#define ulong2(...) msl_make<metal::ulong2>(__VA_ARGS__)
#define ulong3(...) msl_make<metal::ulong3>(__VA_ARGS__)
#define ulong4(...) msl_make<metal::ulong4>(__VA_ARGS__)

template <class To, class From>
METAL_FUNC MSL_UNCHECKED To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
  return __builtin_bit_cast(To, from);
}
namespace metal {
using ::as_type;
}

// The rewriter turns `threadgroup T x[N];` into `typedef T msl_type_x[N]; MSL_THREADGROUP(x);`.
template <class T>
MSL_UNCHECKED inline MSL_LOCAL T& msl_threadgroup_variable(const char* name, int line) {
  return *(MSL_LOCAL T*)msl_rt_threadgroup_memory(name, sizeof(T), line);
}
#define MSL_THREADGROUP(NAME) \
  threadgroup msl_type_##NAME& NAME = msl_threadgroup_variable<msl_type_##NAME>(#NAME, __LINE__)
