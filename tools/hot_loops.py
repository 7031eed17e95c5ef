"""Report copies, spills and predicted cycles (llvm-mca) of the loops that multiply in compiled kernels.

    python tools/hot_loops.py [--level avx512] [--cpus sapphirerapids,znver4] [--json] [BUILD]

The tool reads the objects of a build (``build/cp*``), so it can check instruction sets that this CPU lacks.
It looks at innermost loops with at least ``MIN_PRODUCTS`` dot products or fused multiplications. The exit
code is 1 if an AVX-512 loop spills vectors, lacks prefetches, or takes more cycles than its products need.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

MIN_PRODUCTS = 8
JUDGED, JUDGED_CPU = "_avx512.cpp", "sapphirerapids"
CYCLES = {"vdpbf16ps": 2.0}  # llvm-mca's cycles of a product on JUDGED_CPU
CYCLES_OF_OTHERS = 1.0
SLACK, SLACK_CYCLES = 1.3, 4.0
PRODUCTS_PER_SPILL = 8
ITERATIONS = 200
PRODUCTS = ("vpdpbusd", "vdpbf16ps", "vpmaddubsw", "vpmaddwd", "vfmadd")
ROUNDINGS = ("vcvtps2dq",)
CPUS = {"avx2": "znver3,skylake", "avx512": "sapphirerapids,znver4"}
_LINE = re.compile(r"^ *([0-9a-f]+):\t(.*)$")
_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
_JUMP = re.compile(r"^j\w+ +([0-9a-f]+) <")
_COPY = re.compile(r"^vmov[adu]\w* +%([yz]mm\d+),%([yz]mm\d+)$")
_SPILL = re.compile(r"^v\S+ .*\(%r[sb]p\).*")
_VECTOR = re.compile(r"%[yz]mm\d+")
# The last template argument of these functions is the number of cache lines that a pass prefetches.
_LINES_AHEAD = re.compile(r"\bmultiply_(?:group|block)<.*?(\d+)>\(")


@dataclass(frozen=True, slots=True)
class Loop:
    source: str
    function: str
    products: int
    ideal: float
    copies: int
    spills: int
    prefetches: int = 0
    cycles: dict[str, float] = field(default_factory=dict)

    def why_slow(self) -> str | None:
        """Return why this loop is slower than its products or lacks prefetches; None if it is good."""
        if (found := _LINES_AHEAD.search(self.function)) and int(found[1]) != self.prefetches:
            return f"{self.prefetches} lines asked for ahead, {found[1]} should be (a compiler may drop them)"
        if self.spills * PRODUCTS_PER_SPILL > self.products:
            return f"{self.spills} vectors on the stack, at most {self.products // PRODUCTS_PER_SPILL} may be"
        limit = SLACK * self.ideal + SLACK_CYCLES
        predicted = self.cycles.get(JUDGED_CPU, 0.0)
        if predicted > limit:
            return f"{predicted:.1f} cycles on {JUDGED_CPU}, at most {limit:.1f} may be"
        return None


def loops_of(disassembly: str, source: str) -> Iterator[tuple[Loop, list[str]]]:
    function, body = "?", list[tuple[int, str]]()
    for line in (*disassembly.splitlines(), "0 <end>:"):
        if found := _FUNCTION.match(line):
            for code in _innermost(body):
                products = _count(code, PRODUCTS)
                if products >= MIN_PRODUCTS and 2 * _count(code, ROUNDINGS) < products:
                    slow = sum(
                        (cycles - CYCLES_OF_OTHERS) * _count(code, (name,)) for name, cycles in CYCLES.items()
                    )
                    copies = sum(bool(_COPY.match(each)) for each in code)
                    spills = sum(bool(_SPILL.match(each) and _VECTOR.search(each)) for each in code)
                    ideal = products * CYCLES_OF_OTHERS + slow
                    prefetches = _count(code, ("prefetch",))
                    yield Loop(source, function, products, ideal, copies, spills, prefetches), code
            function, body = found[1], []
        elif found := _LINE.match(line):
            body.append((int(found[1], 16), found[2].split("#")[0].strip()))


def _innermost(body: list[tuple[int, str]]) -> Iterator[list[str]]:
    at = {address: index for index, (address, _) in enumerate(body)}
    for index, (_, code) in enumerate(body):
        jump = _JUMP.match(code)
        first = at.get(int(jump[1], 16)) if jump else None
        if first is None or first >= index:
            continue
        inner = [each for _, each in body[first:index]]
        if not any(each.startswith(("j", "call", "ret")) for each in inner):
            yield inner


def _count(code: Sequence[str], names: tuple[str, ...]) -> int:
    return sum(each.startswith(names) for each in code)


def predicted_cycles(code: Sequence[str], cpu: str, mca: str) -> float:
    """Return the cycles that llvm-mca predicts for one pass. Raises RuntimeError if it rejects the code."""
    done = subprocess.run(
        [mca, f"-mcpu={cpu}", f"-iterations={ITERATIONS}"],
        input="\n".join(code), capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"{mca} -mcpu={cpu}: {done.stderr.strip()[:300]}")
    return int(found[1]) / ITERATIONS


def objects(build: Path, level: str) -> list[Path]:
    return sorted((build / "CMakeFiles" / f"kernels_{level}.dir").rglob("*.o"))


def disassembled(path: Path) -> str:
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def find_mca() -> str | None:
    names = [f"llvm-mca-{number}" for number in range(30, 15, -1)]
    return next((found for name in (*names, "llvm-mca") if (found := shutil.which(name))), None)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("build", nargs="?", type=Path, help="folder of a build (the newest of build/cp*)")
    parser.add_argument("--level", choices=CPUS, default="avx512")
    parser.add_argument("--cpus", help="that llvm-mca is to predict for (avx512: sapphirerapids,znver4)")
    parser.add_argument(
        "--all", action="store_true", help="print every loop, not only those that are too slow"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    builds = sorted(Path("build").glob("cp*"), key=lambda each: each.stat().st_mtime)
    build = args.build or (builds[-1] if builds else Path("build"))
    paths = objects(build, args.level)
    if not paths:
        print(
            f"hot_loops: no {args.level} objects in {build}; install Octavo first (make lint)",
            file=sys.stderr,
        )
        return 2
    mca, cpus = find_mca(), (args.cpus or CPUS[args.level]).split(",")
    loops = []
    for path in paths:
        for loop, code in loops_of(disassembled(path), path.name.removesuffix(".o")):
            if mca:
                loop.cycles.update({cpu: predicted_cycles(code, cpu, mca) for cpu in cpus})
            loops.append(loop)
    slow = {id(loop): why for loop in loops if loop.source.endswith(JUDGED) and (why := loop.why_slow())}
    for loop in sorted(loops, key=lambda each: -each.spills / each.products):
        if args.all or id(loop) in slow:
            print(_line(loop, slow.get(id(loop))))
    predicted = f"predicted by {mca}" if mca else "no llvm-mca: cycles are not predicted (Debian: llvm-19)"
    print(f"hot_loops: {len(loops)} loops at {args.level}, {len(slow)} too slow; {predicted}")
    if args.json:
        print(json.dumps([asdict(loop) for loop in loops]))
    return 1 if slow else 0


def _line(loop: Loop, why: str | None) -> str:
    cycles = " ".join(f"{cpu} {value:.1f}" for cpu, value in loop.cycles.items())
    counts = f"products {loop.products} copies {loop.copies} spills {loop.spills}"
    return f"{loop.source}: {loop.function[:90]}: {counts} {cycles}{f': {why}' if why else ''}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
