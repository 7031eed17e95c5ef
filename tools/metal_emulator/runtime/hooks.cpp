// Functions that an instrumented kernel calls. clang's -fsanitize=thread inserts calls of __tsan_read4 etc.,
// and -fsanitize=undefined calls of __ubsan_handle_*. No sanitizer runtime is linked.
#include <cstring>

#include "machine.h"

#define CALLER reinterpret_cast<uint64_t>(__builtin_return_address(0))
#define ADDRESS(pointer) reinterpret_cast<uint64_t>(pointer)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

#define MSL_ACCESSES(size)                                                                    \
  void __tsan_read##size(void* p) { msl::access(ADDRESS(p), size, false, CALLER); }           \
  void __tsan_write##size(void* p) { msl::access(ADDRESS(p), size, true, CALLER); }           \
  void __tsan_unaligned_read##size(void* p) { msl::access(ADDRESS(p), size, false, CALLER); } \
  void __tsan_unaligned_write##size(void* p) { msl::access(ADDRESS(p), size, true, CALLER); } \
  void __tsan_read_write##size(void* p) {                                                     \
    msl::access(ADDRESS(p), size, false, CALLER);                                             \
    msl::access(ADDRESS(p), size, true, CALLER);                                              \
  }                                                                                           \
  void __tsan_unaligned_read_write##size(void* p) {                                           \
    msl::access(ADDRESS(p), size, false, CALLER);                                             \
    msl::access(ADDRESS(p), size, true, CALLER);                                              \
  }
MSL_ACCESSES(1)
MSL_ACCESSES(2)
MSL_ACCESSES(4)
MSL_ACCESSES(8)
MSL_ACCESSES(16)

void* __tsan_memcpy(void* to, const void* from, uint64_t size) {
  msl::access(ADDRESS(from), size, false, CALLER);
  msl::access(ADDRESS(to), size, true, CALLER);
  return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, uint64_t size) {
  msl::access(ADDRESS(from), size, false, CALLER);
  msl::access(ADDRESS(to), size, true, CALLER);
  return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, uint64_t size) {
  msl::access(ADDRESS(to), size, true, CALLER);
  return memset(to, value, size);
}
void msl_rt_atomic(const void* address, uint32_t size) {
  msl::access(ADDRESS(address), size, true, CALLER, true);
}

// The data that clang passes to every UBSan handler starts with this.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

static void undefined_behaviour(const SourceLocation* at, const char* what, uint64_t pc) {
  const char* slash = strrchr(at->file, '/');
  const char* file = slash ? slash + 1 : at->file;
  msl::report(false, pc, 0, static_cast<int>(at->line), "undefined behaviour: %s (%s:%u:%u)", what, file,
              at->line, at->column);
}

#define MSL_UNDEFINED(what)                                                                  \
  void __ubsan_handle_##what(SourceLocation* at) { undefined_behaviour(at, #what, CALLER); } \
  void __ubsan_handle_##what##_abort(SourceLocation* at) {                                   \
    undefined_behaviour(at, #what, CALLER);                                                  \
    msl::machine.is_aborted = true;                                                          \
    msl::leave();                                                                            \
  }
void __ubsan_handle_type_mismatch_v1(SourceLocation* at, uint64_t pointer) {
  if (msl::machine.current) undefined_behaviour(at, pointer ? "misaligned access" : "null access", CALLER);
}
MSL_UNDEFINED(add_overflow)
MSL_UNDEFINED(sub_overflow)
MSL_UNDEFINED(mul_overflow)
MSL_UNDEFINED(negate_overflow)
MSL_UNDEFINED(divrem_overflow)
MSL_UNDEFINED(shift_out_of_bounds)
MSL_UNDEFINED(out_of_bounds)
MSL_UNDEFINED(builtin_unreachable)
MSL_UNDEFINED(missing_return)
MSL_UNDEFINED(vla_bound_not_positive)
MSL_UNDEFINED(float_cast_overflow)
MSL_UNDEFINED(load_invalid_value)
MSL_UNDEFINED(invalid_builtin)
MSL_UNDEFINED(nonnull_arg)
MSL_UNDEFINED(pointer_overflow)
MSL_UNDEFINED(local_out_of_bounds)

// Rounds float to bfloat16, ties to even: a routine of compiler-rt that older versions of libgcc lack.
__attribute__((weak)) __bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  const uint32_t rounded = is_nan ? bits | 0x400000 : bits + 0x7FFF + (bits >> 16 & 1);
  const auto upper = static_cast<uint16_t>(rounded >> 16);
  __bf16 result;
  memcpy(&result, &upper, sizeof result);
  return result;
}

}  // extern "C"
