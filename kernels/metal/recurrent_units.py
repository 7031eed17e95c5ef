from __future__ import annotations

from dataclasses import dataclass

from .units import KernelSource, make_unit

MAX_WIDTH = 256
WIDTH_MULTIPLE = 16
"""The width of a state row (delta rule: key dim; SSD: state dim) must be a multiple of this."""

_LANE_VALUES = 16
_ROWS = 2
"""Number of state rows per lane. With 16 values of each, they take 32 registers."""

_MAX_SIMDGROUPS = 4
CONV_THREADS = 64
_AHEAD = 4
"""Number of inputs that a convolution loads before it uses the first."""

_DECAYS = {
    "ready": "gate",
    "softplus": "softplus_decay(gate, float(A_log[A_AT(at)]), float(dt_bias[at]))",
    "bounded": "bounded_decay(gate, float(A_log[A_AT(at)]), float(dt_bias[at]), limits[0])",
}


def takes_width(width: int) -> bool:
    return width % WIDTH_MULTIPLE == 0 and 0 < width <= MAX_WIDTH


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixState:
    """Shape of a layer's state, [heads, height, width]. Each key head serves heads / key_heads heads."""

    heads: int
    key_heads: int
    height: int
    width: int

    def __post_init__(self) -> None:
        if not takes_width(self.width):
            raise ValueError(
                f"rows of a state must be a multiple of {WIDTH_MULTIPLE} values, at most {MAX_WIDTH}, for "
                f"the Metal kernels, got {self.width}; mlx-lm's operations take others"
            )
        if self.key_heads < 1 or self.heads % self.key_heads:
            raise ValueError(
                f"heads of keys must divide those of the state, got {self.key_heads} and {self.heads}"
            )

    @property
    def lanes(self) -> int:
        return 1 << (-(-self.width // _LANE_VALUES) - 1).bit_length()

    @property
    def _simdgroup_rows(self) -> int:
        return _ROWS * 32 // self.lanes

    @property
    def simdgroups(self) -> int:
        return min(_MAX_SIMDGROUPS, -(-self.height // self._simdgroup_rows))

    @property
    def tiles(self) -> int:
        return -(-self.height // (self._simdgroup_rows * self.simdgroups))

    @property
    def suffix(self) -> str:
        return f"h{self.heads}_k{self.key_heads}_{self.height}x{self.width}"

    def macros(self) -> dict[str, int | str]:
        values = self.width // self.lanes
        # Inputs may be views into a larger array, so all of their offsets must allow loads of 4 values.
        sizes = (values, self.heads * self.height)
        return {
            "HEADS": self.heads,
            "KEY_HEADS": self.key_heads,
            "HEIGHT": self.height,
            "WIDTH": self.width,
            "LANES": self.lanes,
            "GROUPS": 32 // self.lanes,
            "VALUES": values,
            "VECTOR": 4 if all(size % 4 == 0 for size in sizes) else 1,
            "ROWS": _ROWS,
            "NUM_SIMDGROUPS": self.simdgroups,
            "THREADS": 32 * self.simdgroups,
        }


def delta_unit(state: MatrixState, gates: str, *, vector_gate: bool, wide_A: bool) -> KernelSource:
    macros = state.macros() | {
        "GATES": state.width if vector_gate else 1,
        "GATE_AT(i)": "((i) / VECTOR * LANES + place.across) * VECTOR + (i) % VECTOR"
        if vector_gate
        else "0u",
        "BLOCK": 8 if vector_gate else 32,
        "DECAY(gate, at)": _DECAYS[gates],
        "BETA(beta)": "beta" if gates == "ready" else "sigmoid(beta) * limits[1]",
        "A_AT(at)": "at" if wide_A else "place.head",
    }
    return make_unit(
        "delta",
        f"{gates}_{'vector' if vector_gate else 'scalar'}{'_wide' if wide_A else ''}_{state.suffix}",
        ("pool", "to_pool", "segments", "checkpoints", "q", "k", "v", "a", "b")
        + (() if gates == "ready" else ("A_log", "dt_bias", "limits")),
        ("y",),
        macros,
        {},
        ("recurrent",),
    )


def ssd_unit(state: MatrixState) -> KernelSource:
    inputs = ("pool", "to_pool", "segments", "checkpoints", "x", "B", "C", "dt")
    return make_unit(
        "ssd",
        state.suffix,
        (*inputs, "A_log", "dt_bias", "D", "limits"),
        ("y",),
        state.macros() | {"BLOCK": 32},
        {},
        ("recurrent",),
    )


def conv_unit(taps: int, channels: int, *, silu: bool, bias: bool) -> KernelSource:
    return make_unit(
        "conv",
        f"t{taps}_c{channels}{'_silu' if silu else ''}{'_bias' if bias else ''}",
        ("pool", "to_pool", "segments", "checkpoints", "x", "weight") + (("bias",) if bias else ()),
        ("y",),
        {
            "TAPS": taps,
            "CHANNELS": channels,
            "THREADS": CONV_THREADS,
            "AHEAD": _AHEAD,
            "SILU": int(silu),
            "BIAS": "float(bias[channel])" if bias else "0.0f",
        },
        {},
        (),
    )
