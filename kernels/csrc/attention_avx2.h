// The integer sides of AVX2, for rows of fp4, fp5 and int4 whose dimension is a multiple of kChunk, and of bf16.
#pragma once

#include "attention_sides.h"

namespace octavo::OCTAVO_ISA {

// 16-bit fixed point: as good as float32. Null for other codes.
const KeySide* word_keys(CodeType codes);
const ValueSide* word_values(CodeType codes);

// 8-bit fixed point: half the instructions, see kernels/README.md for the error. Null for other codes.
const KeySide* byte_keys(CodeType codes);
const ValueSide* byte_values(CodeType codes);

// bf16 pages, 16-bit fixed point where many rows share a tile, float32 below; null for other dimensions.
const KeySide* bf16_word_keys(int dim);
const ValueSide* bf16_word_values(int dim);

// The float32 sides of bf16 pages (attention_portable.cpp); their accumulators hold the even dims of each 16 before
// the odd ones.
extern const KeySide bf16_float_keys;
extern const ValueSide bf16_float_values;

}  // namespace octavo::OCTAVO_ISA
