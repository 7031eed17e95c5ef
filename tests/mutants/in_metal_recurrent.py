"""Bugs in the Metal kernels of recurrent layers, as sources would have them."""

from __future__ import annotations

from mutant import Mutant

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def _walk(file: str, ahead: str) -> tuple[Mutant, ...]:
    """Of a kernel whose state is a matrix; ``ahead``: what its threadgroup makes of tokens ahead."""
    return (
        Mutant(
            f"{file}: {ahead} are read before they are there", file, f"{BARRIER}  // {ahead} are there", ""
        ),
        Mutant(
            f"{file}: {ahead} are overwritten while they are read",
            file,
            f"{BARRIER}  // the {ahead} before are done with",
            "",
        ),
        Mutant(
            f"{file}: the state of the slot written",
            file,
            "load_state(pool, segment[2]",
            "load_state(pool, segment[3]",
        ),
        Mutant(
            f"{file}: the state goes to the slot read",
            file,
            "store_state(to_pool, segment[3]",
            "store_state(to_pool, segment[2]",
        ),
        Mutant(
            f"{file}: a state is kept a row late",
            file,
            "checkpoints[2 * kept] == int(t)",
            "checkpoints[2 * kept] == int(t) - 1",
        ),
        Mutant(f"{file}: the second state that is kept is not", file, "++kept)", "kept = end_kept)"),
        Mutant(
            f"{file}: the last token of a block is left out", file, "n < count; ++n", "n < count - 1; ++n"
        ),
        Mutant(
            f"{file}: rows of other segments", file, "const int first = segment[0],", "const int first = 0,"
        ),
    )


SHARED = (
    Mutant(
        "another head's state",
        "recurrent",
        "* HEADS + head) * HEIGHT",
        "* HEADS + HEADS - 1 - head) * HEIGHT",
    ),
    Mutant("a new sequence reads a slot", "recurrent", "if (slot >= 0) {", "if (true) {"),
    Mutant("recurrent: sums over half the lanes of a row", "recurrent", "step < LANES;", "step < LANES / 2;"),
    Mutant("all tiles are the first", "recurrent", "(tile * NUM_SIMDGROUPS + simd_index)", "simd_index"),
    Mutant(
        "steps that vanish where they are small",
        "recurrent",
        "return fma(2.0f * s, series, x > 0.0f ? x : 0.0f);",
        "return x > 0.0f ? x + 2.0f * s : log(1.0f + e) * (e > 0.01f ? 1.0f : 0.0f);",
    ),
    Mutant("sigmoid upside down", "recurrent", "1.0f / (1.0f + exp(-x))", "1.0f / (1.0f + exp(x))"),
)

DELTA = (
    *_walk("delta", "gates"),
    Mutant(
        "the decay comes after the product",
        "delta",
        "products[j] = fma(s, key[i]",
        "products[j] = fma(s / decays[uint(n) * GATES + GATE_AT(i)], key[i]",
    ),
    Mutant("values are not corrected", "delta", "(float(v[at]) - products[j])", "float(v[at])"),
    Mutant("beta is forgotten", "delta", "- products[j]) * betas[n]", "- products[j])"),
    Mutant("the token's own value is not read", "delta", "fma(u, both, outs[j])", "outs[j]"),
    Mutant("keys of the next head", "delta", "place.head / (HEADS / KEY_HEADS)", "place.head % KEY_HEADS"),
    Mutant(
        "gates of a lane's first values",
        "delta",
        "GATES + GATE_AT(i)];\n        state",
        "GATES + GATE_AT(0)];\n        state",
    ),
    Mutant("gates of the block's first token", "delta", "decays[uint(n) * GATES", "decays[0 * GATES"),
    Mutant(
        "the bias of a gate is forgotten",
        "delta",
        "exp(A_log) * softplus(a + dt_bias)",
        "exp(A_log) * softplus(a)",
    ),
    Mutant("the bound takes no rate", "delta", "sigmoid(exp(A_log) * (a + dt_bias))", "sigmoid(a + dt_bias)"),
    Mutant("the other key is added", "delta", "fma(u, key[i], state", "fma(u, query[i], state"),
)

SSD = (
    *_walk("ssd", "steps"),
    Mutant(
        "limits hide NaN",
        "ssd",
        "return d < lowest ? lowest : d > highest ? highest : d;",
        "return min(max(d, lowest), highest);",
    ),
    Mutant("no lowest step", "ssd", "d < lowest ? lowest : d > highest", "d > highest"),
    Mutant("no highest step", "ssd", "d > highest ? highest : d;", "d;"),
    Mutant("the bias of a step is forgotten", "ssd", "softplus(raw + offset)", "softplus(raw)"),
    Mutant("decay at the wrong rate", "ssd", "exp(-(rate * d))", "exp(-d)"),
    Mutant("inputs are not scaled by the step", "ssd", "scaled = steps[n] * value", "scaled = value"),
    Mutant(
        "outputs of the state before",
        "ssd",
        "sum = fma(s, out[i], sum)",
        "sum = fma(s - scaled * in[i], out[i], sum)",
    ),
    Mutant("no skip", "ssd", "fma(skip, value, sum)", "sum"),
    Mutant("inputs of the next group", "ssd", "place.head / (HEADS / KEY_HEADS)", "place.head % KEY_HEADS"),
)

CONV = (
    Mutant("conv: inputs behind the last row", "conv", "min(block + n, end - 1)", "block + n"),
    Mutant("conv: the window of another sequence", "conv", "source >= 0 ? float", "true ? float"),
    Mutant("conv: the newest input is left out", "conv", "sum = fma(taps[KEPT], inputs[n], sum);", ""),
    Mutant("conv: the window lags", "conv", "window[KEPT - 1] = inputs[n];", "window[KEPT - 1] = inputs[0];"),
    Mutant("conv: no bias", "conv", "float sum = offset;", "float sum = 0.0f;"),
    Mutant("conv: the second window that is kept is not", "conv", "++kept)", "kept = end_kept)"),
    Mutant("conv: channels beside the last", "conv", "if (channel >= CHANNELS) {", "if (false) {"),
)

MUTANTS = (*SHARED, *DELTA, *SSD, *CONV)
