// Detection of channels in MLX's affine format: outputs whose group scales are small multiples of one scale.
#pragma once

#include <cstdint>

namespace octavo {

// Returns the channel scale of an output with 8- or 4-bit codes, given its groups' scales and biases; NaN if
// it is no channel. Writes factors [groups][2], see PackedWeight::factors.
float find_channel(int bits, const float* scales, const float* biases, int groups, uint8_t* factors);

}  // namespace octavo
