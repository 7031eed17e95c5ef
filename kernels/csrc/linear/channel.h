// Detection of per-channel scales in MLX's affine format: group scales that are small multiples of one scale.
#pragma once

#include <cstdint>

namespace octavo {

// Returns the channel scale of an output with 8- or 4-bit codes, given its groups' scales and biases; NaN if
// there is no such scale. Writes factors [groups][2], see PackedWeight::factors.
float find_channel(int bits, const float* scales, const float* biases, int groups, uint8_t* factors);

}  // namespace octavo
