// The sides of attention for AVX-512 with VNNI and bf16; other codes take those of attention_float.h.
#include "attention_avx512.h"

namespace octavo::OCTAVO_ISA {

const KeySide* special_key_side(const AttendArgs& args) {
  switch (args.layout.k.codes) {
    case CodeType::fp4: return &fp4_keys;
    case CodeType::bf16: return args.queries.type == Float::bf16 ? &bf16_keys : nullptr;
    default: return nullptr;
  }
}

const ValueSide* special_value_side(const AttendArgs& args) {
  switch (args.layout.v.codes) {
    case CodeType::fp4: return &fp4_values;
    case CodeType::bf16: return args.queries.type == Float::bf16 ? &bf16_values : nullptr;
    default: return nullptr;
  }
}

}  // namespace octavo::OCTAVO_ISA
