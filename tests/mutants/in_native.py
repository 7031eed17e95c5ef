from __future__ import annotations

import in_native_attention
from mutant import bug

STEPS = (
    # captured steps
    bug(
        "a program computes with its first values",
        "std::memcpy(inputs[input].memory, from, sizeof(int32_t) * inputs[input].size);",
        "continue;",
    ),
    bug(
        "a range is too small for its array",
        "take(kLine + (bytes + kLine - 1) / kLine * kLine)",
        "take(kLine + bytes / 2 / kLine * kLine)",
    ),
    bug(
        "weights a program reads are not held",
        "if (results.count(input.id()) == 0) read_.push_back(input);",
        "",
    ),
    bug(
        "sums and products are taken for each other", '"Multiply") == 0, encoder', '"Multiply") != 0, encoder'
    ),
    bug("memory that MLX reads begins at its buffer", "from.flags(), from.offset());", "from.flags(), 0);"),
)

MAPPED = (
    # mapped weights
    bug("arrays may end behind their file", "bytes <= size_ - offset", "bytes <= 2 * size_"),
    bug(
        "a copy is a view of the file",
        "  mx::array copy(plain.shape()",
        "  if (plain.size() > 0) return plain;\n  mx::array copy(plain.shape()",
    ),
)

STORES = (
    # rows in registers
    bug(
        "ties of E2M1 go to the odd code",
        "(quotient + magic) - magic",
        "(quotient * 1.0000001f + magic) - magic",
    ),
)

LINEAR = (
    # 8-bit products in linear layers
    bug(
        "biases meet half of the activations",
        "static_cast<float>(quantized.even + quantized.odd)",
        "static_cast<float>(2 * quantized.even)",
    ),
    bug("sums of two activations overflow", "if (pairs) {", "if (pairs && block == 0) {"),
)

CHANNELS = (
    # one scale per output, AVX-512
    bug(
        "4-bit codes of few rows lose their zeros",
        "_mm512_mullo_epi32(start, _mm512_set1_epi32(x_sum))",
        "_mm512_setzero_si512()",
    ),
    bug(
        "outputs have the factors of the first",
        "const __m512i factor = spread16(factors + n, 0x00010001);",
        "const __m512i factor = spread16(factors, 0x00010001);",
    ),
)

QUANTIZED = (
    # weights with one scale per output channel, during loading
    bug("NaN has some code", "shifted & (UintVec)(exact == exact) & 0xff", "shifted & 0xff"),
    bug(
        "a dequantized weight is rounded once",
        "* scale;\n  }\n  round_floats(call.type, call.group, values);",
        "* scale;\n  }",
    ),
)

AFFINE = (
    # weights in MLX's affine format, during loading
    bug(
        "NaN spreads to its group",
        "low = x < low ? x : low;\n    high = x > high ? x : high;",
        "low = low < x ? low : x;\n    high = high > x ? high : x;",
    ),
    bug("two codes share a bit", "pairs[i] | pairs[i] >> 4", "pairs[i] | pairs[i] >> 3"),
)

PACKED = (
    # layout of packed quantized weights
    bug(
        "nibbles stay where they are",
        "words = (words & 0xff0000ff)",
        "words = true ? words : (words & 0xff0000ff)",
    ),
)

POOLS = (
    # attention over quantized and residual pages
    bug(
        "what one pool gives lies at rows of another head",
        "at(int64_t token, int head) const { return token * num_heads + head; }",
        "at(int64_t token, int head) const { return token * num_heads + 0 * head; }",
    ),
    bug(
        "the upper half of a tile has no weights",
        "for (int i = 0; i < kVectors; ++i) {\n    const Vec weights",
        "for (int i = 0; i < kVectors / 2; ++i) {\n    const Vec weights",
    ),
)

ROWS = (
    # row operations; selection of computed rows
    bug(
        "a node whose other output is needed whole is computed again",
        "for (const mx::array& sibling : node.siblings()) shared_.insert(sibling.id());",
        "",
    ),
)

SAMPLING = (
    # sampling
    bug(
        "the end of a nucleus is sought too low",
        "if (found.above + mass >= target) {",
        "if (found.above + mass >= 1.5 * target) {",
    ),
    bug(
        "half of a row of 16-bit logits becomes floats",
        "load_floats(row.logits, row.type, 0, row.size, floats);",
        "load_floats(row.logits, row.type, 0, row.size / 2, floats);",
    ),
)

MUTANTS = (
    *STEPS, *MAPPED, *in_native_attention.MUTANTS, *STORES, *LINEAR, *CHANNELS, *QUANTIZED, *AFFINE,
    *PACKED, *POOLS, *ROWS, *SAMPLING,
)  # fmt: skip
