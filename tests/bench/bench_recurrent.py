"""Time native recurrences against mlx-lm's operations and against the memory bandwidth.

    python tests/bench/bench_recurrent.py [--threads N] [--kernels delta,conv] [--sizes 1x1,1x64]

Shapes come from published models. Each call uses new states, so the CPU cache never has them.
Reports the fastest of several short runs. The last line is JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import silu, softplus
from mlx.nn.layers.convolution import Conv1d
from mlx_lm.models import bailing_moe_linear as mlx_lm_lightning
from mlx_lm.models import gated_delta as mlx_lm_delta
from mlx_lm.models import recurrent_gemma as mlx_lm_lru
from mlx_lm.models import rwkv7 as mlx_lm_rwkv7
from mlx_lm.models import ssm as mlx_lm_ssm

from octavo.kernels import _ext
from octavo.kernels.cpu import recurrent
from octavo.kernels.cpu.recurrent import StateArrays
from octavo.kernels.recurrent_kernels import DeltaGates, SsdParameters
from octavo.kernels.state_segments import StateSegments

BURST = 0.05  # seconds
LAYERS = 24
POOL_BYTES = 128 * 1024**2
draw = np.random.default_rng(0)

Run = Callable[[int], list[mx.array]]


@dataclass(frozen=True)
class Subject:
    name: str
    units: int
    native: Run
    plain: Run
    bound: Callable[[int], None] | None


def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(draw.standard_normal(shape, dtype=np.float32)).astype(dtype)


def steps(num_slots: int, sequences: int, tokens: int) -> list[StateArrays]:
    order = draw.permutation(num_slots).tolist()
    groups = [order[i : i + sequences] for i in range(0, num_slots - sequences + 1, sequences)]
    return [StateArrays.of(StateSegments.of([tokens] * sequences, source=group)) for group in groups]


def runs(
    state: tuple[int, ...],
    dtype: mx.Dtype,
    sequences: int,
    tokens: int,
    kernel: Callable[[mx.array, StateArrays], tuple[mx.array, mx.array]],
) -> tuple[Run, Callable[[int], None], list[mx.array]]:
    size = int(np.prod(state)) * dtype.size
    num_slots = max(sequences, POOL_BYTES // size)
    pools = [recurrent.zeros((num_slots, *state), dtype)]
    memory = np.asarray(pools[0].view(mx.uint8)).reshape(num_slots, -1)
    for slot in range(num_slots):
        memory[slot] = np.asarray(normal(*state, dtype=dtype).view(mx.uint8)).reshape(-1)
    choices = steps(num_slots, sequences, tokens)
    mx.eval(pools, [choice.segments for choice in choices], [choice.checkpoints for choice in choices])
    plain_states = [normal(sequences, *state, dtype=dtype) for _ in choices]
    mx.eval(plain_states)
    floats = memory.view(np.float32)
    slots = [np.array(choice.segments)[:, 2] for choice in choices]

    def native(n: int) -> list[mx.array]:
        pools[0], y = kernel(pools[0], choices[n % len(choices)])
        return [pools[0], y]

    def bound(n: int) -> None:
        for slot in slots[n % len(slots)]:
            np.multiply(floats[slot], np.float32(1), out=floats[slot])

    return native, bound, plain_states


def delta(sequences: int, tokens: int, *, vector: bool = False) -> Subject:
    """Qwen3-Next's shape, or Kimi Linear's with a vector gate."""
    Hk, Hv, D = (32, 32, 128) if vector else (16, 32, 128)
    rows = sequences * tokens
    q, k = (normal(rows, Hk, D) / D for _ in range(2))
    v, b = normal(rows, Hv, D), normal(rows, Hv)
    a = normal(rows, Hv, D) if vector else normal(rows, Hv)
    A_log, dt_bias = normal(Hv, 1) if vector else normal(Hv), normal(*a.shape[1:])
    gates = DeltaGates(kind="softplus", A_log=A_log, dt_bias=dt_bias)
    mx.eval(q, k, v, a, b, A_log, dt_bias)
    native, bound, states = runs(
        (Hv, D, D),
        mx.float32,
        sequences,
        tokens,
        lambda pool, step: recurrent.gated_delta(pool, step, q, k, v, a, b, gates=gates),
    )
    q4, k4, v4, a4, b4 = [x.reshape(sequences, tokens, *x.shape[1:]) for x in (q, k, v, a, b)]

    def plain(n: int) -> list[mx.array]:
        y, states[n % len(states)] = mlx_lm_delta.gated_delta_update(
            q4, k4, v4, a4, b4, A_log, dt_bias, states[n % len(states)]
        )
        return [y, states[n % len(states)]]

    return Subject("gated delta, vector gate" if vector else "gated delta", Hv, native, plain, bound)


def conv(sequences: int, tokens: int, *, dtype: mx.Dtype = mx.bfloat16) -> Subject:
    """Qwen3-Next's shape; a unit is 128 channels."""
    C, K = 8192, 4
    x, weight = normal(sequences * tokens, C, dtype=dtype), normal(K, C, dtype=dtype)
    mx.eval(x, weight)
    native, _, windows = runs(
        (K - 1, C),
        dtype,
        sequences,
        tokens,
        lambda pool, step: recurrent.causal_conv(pool, step, x, weight, silu=True),
    )
    module = Conv1d(C, C, K, groups=C, bias=False)
    module.weight = mx.contiguous(weight.T[..., None])
    shaped = x.reshape(sequences, tokens, C)
    mx.eval(module.parameters())

    def plain(n: int) -> list[mx.array]:
        i = n % len(windows)
        whole = mx.concatenate([windows[i], shaped], axis=1)
        windows[i] = mx.contiguous(whole[:, 1 - K :])
        return [silu(module(whole)), windows[i]]

    return Subject(f"convolution and silu, {dtype}", C // 128, native, plain, None)


def ssd(sequences: int, tokens: int) -> Subject:
    """The shape of Granite 4 and Nemotron-H."""
    H, G, Dh, Ds = 64, 8, 64, 128
    rows = sequences * tokens
    x, B, C, dt = normal(rows, H, Dh), normal(rows, G, Ds), normal(rows, G, Ds), normal(rows, H)
    A_log, dt_bias, D = normal(H), normal(H), normal(H)
    parameters = SsdParameters(A_log=A_log, dt_bias=dt_bias, D=D, lowest=0.001, highest=100.0)
    mx.eval(x, B, C, dt, A_log, dt_bias, D)
    native, bound, states = runs(
        (H, Dh, Ds),
        mx.float32,
        sequences,
        tokens,
        lambda pool, step: recurrent.ssd(pool, step, x, B, C, dt, parameters=parameters),
    )
    x4, B4, C4, dt4 = [part.reshape(sequences, tokens, *part.shape[1:]) for part in (x, B, C, dt)]

    def plain(n: int) -> list[mx.array]:
        y, states[n % len(states)] = mlx_lm_ssm.ssm_attn(
            x4, A_log, B4, C4, D, dt4, dt_bias, states[n % len(states)]
        )
        return [y, states[n % len(states)]]

    return Subject("SSD", H, native, plain, bound)


def scan(sequences: int, tokens: int) -> Subject:
    """Falcon-Mamba's shape; a unit is a channel."""
    W, Ds = 8192, 16
    rows = sequences * tokens
    x, d, B, C, D = (
        normal(rows, W),
        mx.abs(normal(rows, W)) / 10,
        normal(rows, Ds),
        normal(rows, Ds),
        normal(W),
    )
    A = -mx.broadcast_to(mx.arange(1, Ds + 1).astype(mx.float32), (W, Ds))
    A = mx.contiguous(A)
    mx.eval(x, d, B, C, A, D)
    native, bound, states = runs(
        (W, Ds),
        mx.float32,
        sequences,
        tokens,
        lambda pool, step: recurrent.recurrence("selective_scan", pool, step, [x, d, B, C, A, D]),
    )
    xs, ds, bs, cs = (part.reshape(sequences, tokens, -1) for part in (x, d, B, C))

    def plain(n: int) -> list[mx.array]:
        state, out = states[n % len(states)], []
        for t in range(tokens):
            new = mx.expand_dims(ds[:, t] * xs[:, t], -1) * mx.expand_dims(bs[:, t], 1)
            state = new + state * mx.exp(mx.expand_dims(ds[:, t], -1) * A)
            out.append((state @ mx.expand_dims(cs[:, t], -1)).squeeze(2) + D * xs[:, t])
        y = mx.stack(out, axis=1)
        states[n % len(states)] = state
        return [y, state]

    return Subject("selective scan", W, native, plain, bound)


def lightning(sequences: int, tokens: int) -> Subject:
    """Ling-mini-linear's shape."""
    H, D = 16, 128
    q, k, v = (normal(sequences * tokens, H, D) / D for _ in range(3))
    log_decay = -mx.exp(normal(H))
    mx.eval(q, k, v, log_decay)
    native, bound, states = runs(
        (H, D, D),
        mx.float32,
        sequences,
        tokens,
        lambda pool, step: recurrent.recurrence("lightning", pool, step, [q, k, v, log_decay], [D**-0.5]),
    )
    q4, k4, v4 = (x.reshape(sequences, tokens, H, D).swapaxes(1, 2) for x in (q, k, v))

    def plain(n: int) -> list[mx.array]:
        y, states[n % len(states)] = mlx_lm_lightning.recurrent_gla(
            q4, k4, v4, log_decay, D**-0.5, states[n % len(states)]
        )
        return [y, states[n % len(states)]]

    return Subject("lightning attention", H, native, plain, bound)


def rg_lru(sequences: int, tokens: int) -> Subject:
    """RecurrentGemma's shape; a unit is 128 channels."""
    W = 2560
    x, input_gate, a_gate = (normal(sequences * tokens, W) for _ in range(3))
    c = -8 * softplus(normal(W))
    mx.eval(x, input_gate, a_gate, c)
    native, bound, states = runs(
        (W,),
        mx.float32,
        sequences,
        tokens,
        lambda pool, step: recurrent.recurrence("rg_lru", pool, step, [x, input_gate, a_gate, c]),
    )
    xs, inputs, gates = (part.reshape(sequences, tokens, W) for part in (x, input_gate, a_gate))

    def plain(n: int) -> list[mx.array]:
        i = n % len(states)
        log_a = c * mx.sigmoid(gates)
        scaled = xs * mx.sigmoid(inputs) * mx.sqrt(1 - mx.exp(2 * log_a))
        scan: Any = mlx_lm_lru.rnn_scan
        y, states[i] = scan(scaled, mx.exp(log_a), states[i])
        return [y, states[i]]

    return Subject("RG-LRU", W // 128, native, plain, bound)


def wkv7(sequences: int, tokens: int) -> Subject:
    """RWKV-7's shape at 2.9 billion parameters."""
    H, D = 40, 64
    rows = sequences * tokens
    r, k, v, a, b = (normal(rows, H, D) / D for _ in range(5))
    w = mx.sigmoid(normal(rows, H, D))
    mx.eval(r, w, k, v, a, b)
    native, bound, states = runs(
        (H, D, D),
        mx.float32,
        sequences,
        tokens,
        lambda pool, step: recurrent.recurrence("wkv7", pool, step, [r, w, k, v, a, b]),
    )
    parts = [x.reshape(sequences, tokens, H, D) for x in (r, w, k, v, a, b)]
    step: Any = mlx_lm_rwkv7._wkv7_step_ops

    def plain(n: int) -> list[mx.array]:
        state, out = states[n % len(states)], []
        for t in range(tokens):
            y, state = step(*[x[:, t] for x in parts], state)
            out.append(y)
        states[n % len(states)] = state
        return [mx.stack(out, axis=1), state]

    return Subject("wkv7", H, native, plain, bound)


KERNELS: dict[str, Callable[[int, int], Subject]] = {
    "delta": delta,
    "vector": lambda sequences, tokens: delta(sequences, tokens, vector=True),
    "conv": conv,
    "ssd": ssd,
    "scan": scan,
    "lightning": lightning,
    "rg_lru": rg_lru,
    "wkv7": wkv7,
}


def together(run: Run) -> Callable[[int], None]:
    def step(n: int) -> None:
        mx.eval([run(LAYERS * n + layer) for layer in range(LAYERS)])

    return step


def seconds(subject: Subject, rounds: int, clock: Callable[[], float]) -> list[float]:
    """Return the shortest seconds per layer: native kernel, mlx-lm, and moving the states if measured."""
    calls = [(together(subject.native), LAYERS), (together(subject.plain), LAYERS)]
    if subject.bound is not None:
        calls.append((subject.bound, 1))
    best, counts = [float("inf")] * len(calls), []
    for call, _ in calls:
        call(0)
        began = clock()
        call(1)
        counts.append(max(1, round(BURST / (clock() - began))))
    number = 2
    for _ in range(rounds):
        for i, (call, size) in enumerate(calls):
            began = clock()
            for _ in range(counts[i]):
                call(number)
                number += 1
            best[i] = min(best[i], (clock() - began) / counts[i] / size)
    return best


def measure(
    name: str, sequences: int, tokens: int, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    subject = KERNELS[name](sequences, tokens)
    native, plain, *bound = seconds(subject, rounds, clock)
    unit = sequences * tokens * subject.units / 1e9
    row: dict[str, Any] = {
        "kernel": subject.name,
        "sequences": sequences,
        "tokens": tokens,
        "ns": round(native / unit, 1),
        "mlx_lm_ns": round(plain / unit, 1),
        "ratio": round(plain / native, 1),
        "over_bound": round(native / bound[0], 2) if bound and tokens == 1 else None,
    }
    print(
        "{kernel:34} {sequences:3} x {tokens:<4} {ns:10,.1f} {mlx_lm_ns:12,.1f} {ratio:8.1f}x".format(**row),
        row["over_bound"] or "",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--sizes", default="1x1,8x1,1x64", help="sequences x tokens of each")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    _ext.set_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    sizes = [(int(n), int(t)) for n, t in (size.split("x") for size in args.sizes.split(","))]
    print(f"{_ext.isa()}, threads {args.threads}; ns per token and head: native, mlx-lm, ratio, over bound")
    rows = [measure(name, n, t, args.rounds, clock) for name in args.kernels.split(",") for n, t in sizes]
    print(json.dumps({"isa": _ext.isa(), "threads": args.threads, "rows": rows}))


if __name__ == "__main__":
    main()
