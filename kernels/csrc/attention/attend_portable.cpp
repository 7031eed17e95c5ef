// Paged attention for the level OCTAVO_ISA: which sides a call gets, and the loop that joins them.
//
// An item's rows (query tokens times the query heads of one KV head) run against tiles of 64 positions,
// each dequantized once for all of them. Softmax is online, in the log2 domain. What a row computes does
// not depend on the rows beside it, given their number.
#pragma GCC optimize("fp-contract=fast")  // multiply-adds may fuse here: nothing is bit-defined

#include "attention/float.h"
#include "attention/loop.h"

#if defined(__AVX512F__)
namespace octavo::avx2 {
AttendKernel attend_kernel(const AttendArgs& args);
}
#endif

namespace octavo::OCTAVO_ISA {

#if defined(__AVX2__)
// Integer and bf16 arithmetic of the level, or null (attention/sides_avx2.cpp, attention/sides_avx512.cpp).
const KeySide* special_key_side(const AttendArgs& args);
const ValueSide* special_value_side(const AttendArgs& args);
#else
static const KeySide* special_key_side(const AttendArgs&) { return nullptr; }
static const ValueSide* special_value_side(const AttendArgs&) { return nullptr; }
#endif

#if defined(__AVX512F__)
// Where fp16 pages are multiplied as floats they are on both levels, and wider vectors of them were measured
// to be slower.
static bool avx2_is_faster(const AttendArgs& args) {
  return args.layout.k.codes == CodeType::fp16 && args.layout.v.codes == CodeType::fp16 &&
         special_key_side(args) == nullptr && special_value_side(args) == nullptr;
}
#endif

const KeySide* key_side(const AttendArgs& args) {
  if (const KeySide* side = special_key_side(args)) return side;
  switch (args.layout.k.codes) {
    case CodeType::bf16: return &FloatSides<Bf16Codec>::keys;
#if defined(__F16C__)
    case CodeType::fp16: return &FloatSides<Fp16Codec>::keys;
#endif
    default: return &FloatSides<void>::keys;
  }
}

const ValueSide* value_side(const AttendArgs& args) {
  if (const ValueSide* side = special_value_side(args)) return side;
  switch (args.layout.v.codes) {
    case CodeType::bf16: return &FloatSides<Bf16Codec>::values;
#if defined(__F16C__)
    case CodeType::fp16: return &FloatSides<Fp16Codec>::values;
#endif
    default: return &FloatSides<void>::values;
  }
}

AttendKernel attend_kernel(const AttendArgs& args) {
#if defined(__AVX512F__)
  if (avx2_is_faster(args)) return avx2::attend_kernel(args);
#endif
  return tile_kernel(args);
}

}  // namespace octavo::OCTAVO_ISA
