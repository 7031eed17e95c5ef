from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .honest import Experience, quantile
from .observer import Memory

MIB = 2**20
OWN_MISTAKES = {"UNKNOWN", "INTERNAL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds for the service of honest clients during an attack.

    p99_factor: 99th percentile of gaps between tokens, relative to a run without attacks
    p99_floor:  seconds: shorter gaps are always allowed
    stall:      longest gap in seconds
    first:      longest wait for a first token in seconds
    probe:      longest answer of /healthz in seconds
    kept:       bytes by which memory may have grown after an attack
    peak:       bytes by which memory may grow during an attack."""

    p99_factor: float = 3.0
    p99_floor: float = 0.05
    stall: float = 0.25
    first: float = 10.0
    probe: float = 2.0
    kept: int = 64 * MIB
    peak: int = 256 * MIB

    def times(self, slack: float) -> Bounds:
        return Bounds(
            p99_factor=self.p99_factor * slack,
            p99_floor=self.p99_floor * slack,
            stall=self.stall * slack,
            first=self.first * slack,
            probe=self.probe * slack,
            kept=int(self.kept * slack),
            peak=int(self.peak * slack),
        )


@dataclass(slots=True)
class Phase:
    name: str
    finding: str
    honest: Experience = field(default_factory=Experience)
    memory: Memory = field(default_factory=Memory)
    worst_probe: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    skipped: str | None = None
    may_see: frozenset[str] = frozenset()

    def judge(self, bounds: Bounds, *, quiet_p99: float) -> None:
        self.wrong += list(dict.fromkeys(self.honest.wrong))
        honest, memory = self.honest, self.memory
        allowed = max(bounds.p99_factor * quiet_p99, bounds.p99_floor) + quantile(honest.late, 0.99)
        latest = max(honest.late, default=0.0)
        self._at_most("p99 gap", quantile(honest.gaps, 0.99), allowed)
        self._at_most("stall", max(honest.gaps, default=0.0), bounds.stall + latest)
        self._at_most("first token", max(honest.first, default=0.0), bounds.first + latest)
        self._at_most("/healthz", self.worst_probe, bounds.probe + latest)
        for what, used, limit in (("kept", memory.after, bounds.kept), ("took", memory.peak, bounds.peak)):
            if used - memory.before > limit:
                self.wrong.append(
                    f"{what} {(used - memory.before) / MIB:.0f} MiB, {limit / MIB:.0f} are allowed"
                )
        if unexpected := set(self.seen) & OWN_MISTAKES - self.may_see:
            self.wrong.append(f"the server's own errors: {', '.join(sorted(unexpected))}")

    def _at_most(self, what: str, seconds: float, bound: float) -> None:
        if seconds > bound:
            self.wrong.append(f"{what} {seconds * 1e3:.0f} ms, {bound * 1e3:.0f} are allowed")

    def as_json(self) -> dict[str, Any]:
        honest, memory = self.honest, self.memory
        return {
            "name": self.name,
            "finding": self.finding,
            "skipped": self.skipped,
            "answers": honest.answers,
            "refusals": honest.refusals,
            "gap_ms": _spread(honest.gaps),
            "first_token_ms": _spread(honest.first),
            "late_ms": _spread(honest.late),
            "healthz_ms": _ms(self.worst_probe),
            "memory_mib": {
                "before": round(memory.before / MIB),
                "took": round((memory.peak - memory.before) / MIB),
                "kept": round((memory.after - memory.before) / MIB),
            },
            "statuses": dict(self.seen),
            "violations": self.wrong,
        }

    def line(self) -> str:
        if self.skipped is not None:
            return f"{self.name:19} {self.finding:10} not run: {self.skipped}"
        row = self.as_json()
        gap, memory, first = row["gap_ms"], row["memory_mib"], row["first_token_ms"]["max"]
        return (
            f"{self.name:19} {self.finding:10} {row['answers']:5} {row['refusals']:5} {gap['p50']:7.1f} "
            f"{gap['p99']:7.1f} {gap['max']:7.0f} {first:7.0f} {row['healthz_ms']:7.0f} "
            f"{row['late_ms']['max']:5.0f} {memory['took']:6} {memory['kept']:6}  "
            f"{'FAILED' if self.wrong else 'held'}"
        )


HEADER = (
    f"{'':30} honest        gap of tokens, ms      first  /healthz client     MiB\n"
    f"{'phase':19} {'finding':10} {'whole':>5} {'later':>5} {'p50':>7} {'p99':>7} {'max':>7} {'ms':>7} "
    f"{'ms':>7} {'late':>5} {'took':>6} {'kept':>6}"
)


def _spread(times: list[float]) -> dict[str, float]:
    shares = (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    return {name: _ms(quantile(times, share)) for name, share in shares}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
