// Chooses between the integer sides (attention/sides.h) for AVX2.
#include "attention/sides_avx2.h"
#include "attention/codes_avx2.h"

namespace octavo::OCTAVO_ISA {

const KeySide* special_key_side(const AttendArgs& args) {
  const RowFormat& format = args.layout.k;
  if (format.dim % kChunk != 0 || !by_bytes(args)) return nullptr;
  if (const KeySide* side = byte_keys(format.codes)) return side;
  return int8_keys(format.codes);
}

const ValueSide* special_value_side(const AttendArgs& args) {
  const RowFormat& format = args.layout.v;
  if (format.dim % kChunk != 0 || !by_bytes(args)) return nullptr;
  if (const ValueSide* side = byte_values(format.codes)) return side;
  return int8_values(format.codes);
}

}  // namespace octavo::OCTAVO_ISA
