// Integer key sides and value sides for AVX2, for pages of codes whose dimensions are multiples of kChunk.
#pragma once

#include "attention/sides.h"

namespace octavo::OCTAVO_ISA {

// Return the sides for fp4, fp5 and int4 in 8-bit fixed point (kernels/README.md has its error), or null.
const KeySide* byte_keys(CodeType codes);
const ValueSide* byte_values(CodeType codes);

// Return the sides for int8 in 16-bit fixed point; null for other codes.
const KeySide* int8_keys(CodeType codes);
const ValueSide* int8_values(CodeType codes);

}  // namespace octavo::OCTAVO_ISA
