from __future__ import annotations

import pytest

import hot_loops
from hot_loops import Loop, loops_of

PRODUCT = "vpdpbusd %zmm1,%zmm2,%zmm3"


def disassembly(*inner: str) -> str:
    """Return a function with a loop of these instructions at 0x10."""
    lines = ["0000000000000000 <octavo::multiply(int)>:", "   0:\tpush   %rbp"]
    lines += [f"  {0x10 + index:2x}:\t{code}" for index, code in enumerate(inner)]
    lines += [f"  {0x10 + len(inner):2x}:\tjne    10 <octavo::multiply(int)+0x10>", "  f0:\tret"]
    return "\n".join(lines)


def only(*inner: str) -> Loop:
    ((loop, code),) = loops_of(disassembly(*inner), "some_avx512.cpp")
    assert code == list(inner)
    return loop


def test_a_loop_of_products_is_found_and_counted() -> None:
    loop = only(
        *[PRODUCT] * 7, "vdpbf16ps %zmm1,%zmm2,%zmm3", "vmovdqa64 %zmm4,%zmm5",
        "vmovups %zmm6,0x40(%rsp)", "vmovups 0x40(%rax),%zmm6", "mov    0x8(%rsp),%rax",
    )  # fmt: skip
    assert (loop.function, loop.products, loop.ideal) == ("octavo::multiply(int)", 8, 9.0)
    assert (loop.copies, loop.spills) == (1, 1)


@pytest.mark.parametrize("between", ["call   5 <other>", "je     f0 <octavo::multiply(int)+0xf0>", "ret"])
def test_loops_with_calls_or_branches_are_not_hot(between: str) -> None:
    assert not list(loops_of(disassembly(*[PRODUCT] * 8, between), "some_avx512.cpp"))


def test_spills_and_cycles_beyond_those_of_the_products_are_too_slow() -> None:
    spilling = only(*[PRODUCT] * 15, "vmovups %zmm6,0x40(%rsp)", "vmovups 0x40(%rsp),%zmm6", PRODUCT)
    assert spilling.why_slow() is None
    spilling = only(*[PRODUCT] * 15, "vmovups %zmm6,0x40(%rsp)", "vmovups 0x40(%rsp),%zmm6")
    assert spilling.why_slow() == "2 vectors on the stack, at most 1 may be"
    loop = only(*[PRODUCT] * 12)
    loop.cycles[hot_loops.JUDGED_CPU] = 19.0
    assert loop.why_slow() is None
    loop.cycles[hot_loops.JUDGED_CPU] = 36.0
    assert loop.why_slow() == "36.0 cycles on sapphirerapids, at most 19.6 may be"


def test_without_a_build_one_line_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert hot_loops.main(["/nowhere"]) == 2
    assert "no avx512 objects in /nowhere" in capsys.readouterr().err
