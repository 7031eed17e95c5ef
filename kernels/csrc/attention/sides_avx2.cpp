// Which integer sides a call gets on AVX2.
#include "attention/sides_avx2.h"
#include "attention/codes_avx2.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Rows of 16 bits carry no more than bytes keep, beside the error of 4-bit pages.
bool by_bytes(const AttendArgs& args) { return !args.exact && args.queries.type != Float::f32; }

}  // namespace

const KeySide* special_key_side(const AttendArgs& args) {
  const RowFormat& format = args.layout.k;
  if (format.dim % kChunk != 0) return nullptr;
  if (!by_bytes(args)) return word_keys(format.codes);
  const KeySide* const side = byte_keys(format.codes);
  return side != nullptr ? side : group_keys(format.codes);
}

const ValueSide* special_value_side(const AttendArgs& args) {
  const RowFormat& format = args.layout.v;
  if (format.dim % kChunk != 0) return nullptr;
  if (!by_bytes(args)) return word_values(format.codes);
  const ValueSide* const side = byte_values(format.codes);
  return side != nullptr ? side : group_values(format.codes);
}

}  // namespace octavo::OCTAVO_ISA
