// Chooses sides for AVX-512 with VNNI and bf16; other calls use the float sides (attention/float.h).
#include "attention/sides_avx512.h"

namespace octavo::OCTAVO_ISA {

const KeySide* special_key_side(const AttendArgs& args) {
  if (const KeySide* side = tiled_keys(args)) return side;
  if (args.layout.k.codes == CodeType::bf16) return args.queries.type == Float::bf16 ? &bf16_keys : nullptr;
  return code_keys(args);
}

const ValueSide* special_value_side(const AttendArgs& args) {
  if (const ValueSide* side = tiled_values(args)) return side;
  if (args.layout.v.codes == CodeType::bf16) return args.queries.type == Float::bf16 ? &bf16_values : nullptr;
  return code_values(args);
}

}  // namespace octavo::OCTAVO_ISA
