from __future__ import annotations

from mutant import Mutant

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def _walk(file: str, ahead: str) -> tuple[Mutant, ...]:
    return (
        Mutant(
            f"{file}: {ahead} are read before they are there",
            file,
            f"{BARRIER}  // the {ahead} are stored",
            "",
        ),
        Mutant(
            f"{file}: {ahead} are overwritten while they are read",
            file,
            f"{BARRIER}  // earlier {ahead} may be overwritten",
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
    Mutant("recurrent: sums over half the lanes of a row", "recurrent", "step < LANES;", "step < LANES / 2;"),
    Mutant(
        "steps that vanish where they are small",
        "recurrent",
        "return fma(2.0f * s, series, x > 0.0f ? x : 0.0f);",
        "return x > 0.0f ? x + 2.0f * s : log(1.0f + e) * (e > 0.01f ? 1.0f : 0.0f);",
    ),
)

DELTA = (
    *_walk("delta", "gates"),
    Mutant(
        "the decay comes after the product",
        "delta",
        "products[j] = fma(s, key[i]",
        "products[j] = fma(s / decays[uint(n) * GATES + GATE_AT(i)], key[i]",
    ),
    Mutant("beta is forgotten", "delta", "- products[j]) * betas[n]", "- products[j])"),
    Mutant("keys of the next head", "delta", "place.head / (HEADS / KEY_HEADS)", "place.head % KEY_HEADS"),
    Mutant("gates of the block's first token", "delta", "decays[uint(n) * GATES", "decays[0 * GATES"),
    Mutant("the bound takes no rate", "delta", "sigmoid(exp(A_log) * (a + dt_bias))", "sigmoid(a + dt_bias)"),
)

SSD = (
    *_walk("ssd", "steps"),
    Mutant(
        "limits hide NaN",
        "ssd",
        "return d < lowest ? lowest : d > highest ? highest : d;",
        "return min(max(d, lowest), highest);",
    ),
    Mutant("no highest step", "ssd", "d > highest ? highest : d;", "d;"),
    Mutant("decay at the wrong rate", "ssd", "exp(-(rate * d))", "exp(-d)"),
    Mutant(
        "outputs of the state before",
        "ssd",
        "sum = fma(s, out[i], sum)",
        "sum = fma(s - scaled * in[i], out[i], sum)",
    ),
    Mutant("inputs of the next group", "ssd", "place.head / (HEADS / KEY_HEADS)", "place.head % KEY_HEADS"),
)

CONV = (
    Mutant("conv: inputs behind the last row", "conv", "min(block + n, end - 1)", "block + n"),
    Mutant("conv: the newest input is left out", "conv", "sum = fma(taps[KEPT], inputs[n], sum);", ""),
    Mutant("conv: no bias", "conv", "float sum = offset;", "float sum = 0.0f;"),
    Mutant("conv: channels beside the last", "conv", "if (channel >= CHANNELS) {", "if (false) {"),
)

MUTANTS = (*SHARED, *DELTA, *SSD, *CONV)
