// Whether the groups of an output in MLX's affine format are those of a channel: small multiples of one
// scale.
#pragma once

#include <cstdint>

namespace octavo {

// The scale of an output of 8 or 4 bits whose groups have these scales and biases; NaN if it is no channel.
// factors [groups][2]: see PackedWeight::factors.
float find_channel(int bits, const float* scales, const float* biases, int groups, uint8_t* factors);

}  // namespace octavo
