// Paged attention for the instruction set OCTAVO_ISA. This file chooses a call's key side, which computes
// scores, and its value side, which computes weighted sums (attention/sides.h).
//
// An item's rows (query tokens times the query heads of one KV head) attend to tiles of 64 positions. Each
// tile is dequantized once for all rows. Softmax is online, in the log2 domain. A row's result depends on the
// number of rows in its item, but not on their contents.
#pragma GCC optimize("fp-contract=fast")  // fused multiply-adds are fine: no bits are specified

#include "attention/float.h"
#include "attention/loop.h"

namespace octavo::OCTAVO_ISA {

#if defined(__AVX2__)
// Return this instruction set's integer or bf16 sides, or null (attention/*keys_*.cpp, *values_*.cpp).
const KeySide* special_key_side(const AttendArgs& args);
const ValueSide* special_value_side(const AttendArgs& args);
#else
static const KeySide* special_key_side(const AttendArgs&) { return nullptr; }
static const ValueSide* special_value_side(const AttendArgs&) { return nullptr; }
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
  return {attend, merge, value_side(args)->width(args.layout.v.dim)};
}

}  // namespace octavo::OCTAVO_ISA
