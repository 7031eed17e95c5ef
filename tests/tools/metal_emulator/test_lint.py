"""Code that Metal refuses and C++ accepts, one snippet per rule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from metal_emulator import emulate, lint, lint_text, why_unavailable

pytestmark = [pytest.mark.emulator, pytest.mark.slow]

needs_compiler = pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")
NOT_COMPILED = "does not compile"  # the shim's types and address spaces refuse it


@dataclass(frozen=True)
class Snippet:
    label: str
    body: str
    finding: str = ""  # part of the expected finding
    header: str = ""


REFUSED = [
    Snippet(
        "device to threadgroup pointer",
        "threadgroup float s[4]; device float* p = s; out[0] = p[0];",
        NOT_COMPILED,
    ),
    Snippet("device to thread pointer", "float* p = out; p[0] = 1;", NOT_COMPILED),
    Snippet(
        "device argument for a thread pointer", "f(out);", NOT_COMPILED, "inline void f(float* p) { *p = 1; }"
    ),
    Snippet(
        "constant table for a device pointer",
        "out[0] = f(L);",
        NOT_COMPILED,
        "constant float L[2] = {1, 2}; inline float f(const device float* p) { return p[1]; }",
    ),
    Snippet(
        "an input of fewer than 8 elements for a device pointer",
        "out[0] = f(small);",
        NOT_COMPILED,
        "inline int f(const device int* p) { return p[0]; }",
    ),
    Snippet("write through constant", "small[0] = 1; out[0] = 0;", NOT_COMPILED),
    Snippet("write to an input", "x[0] = 1;", NOT_COMPILED),
    Snippet(
        "cast that drops the address space",
        "float* p = (float*)out; p[0] = 1;",
        "cast between address spaces",
    ),
    Snippet(
        "reinterpret_cast between address spaces",
        "device float* p = reinterpret_cast<device float*>((threadgroup float*)0); out[0] = p ? 1 : 0;",
        NOT_COMPILED,
    ),
    Snippet("text that is not ASCII", "out[0] = 1;  // größer", "'ö' is not ASCII"),
    Snippet(
        "a member that says no address space",
        "S4 s; s.a = 1; out[0] = s.get(1);",
        "get does not say the address space",
        "struct S4 { int a; METAL_FUNC int get(int i) const { return a + i; } };",
    ),
    Snippet("double variable", "double d = x[0]; out[0] = d;", "double does not exist"),
    Snippet("double in a cast", "out[0] = (float)((double)x[0] * 3);", "arithmetic in double"),
    Snippet("long long", "long long n = 1; out[0] = n;", "long long"),
    Snippet("lambda", "auto f = [](float a) { return a * 2; }; out[0] = f(x[0]);", "lambda"),
    Snippet(
        "recursion",
        "out[0] = fact(small[0]);",
        "recursion in fact",
        "inline int fact(int n) { return n < 2 ? 1 : n * fact(n - 1); }",
    ),
    Snippet(
        "mutual recursion",
        "out[0] = even(small[0]);",
        "recursion in",
        "int odd(int n); inline int even(int n) { return n ? odd(n - 1) : 1; }"
        "inline int odd(int n) { return n ? even(n - 1) : 0; }",
    ),
    Snippet(
        "function pointer",
        "float (*g)(float) = x[0] > 0 ? f : f; out[0] = g(x[0]);",
        "call through a pointer",
        "inline float f(float a) { return a; }",
    ),
    Snippet(
        "virtual function",
        "A a; out[0] = a.f();",
        "virtual functions",
        "struct A { virtual float f() { return 1; } };",
    ),
    Snippet("goto", "goto e; e: out[0] = 1;", "goto"),
    Snippet("new and delete", "float* p = new float[4]; out[0] = 1; delete[] p;", "new and delete"),
    Snippet("exceptions", "try { out[0] = 1; } catch (...) {}", "exceptions"),
    Snippet("std", "out[0] = std::exp(x[0]);", "std:: is not available", "#include <cmath>"),
    Snippet("a header of C++", "out[0] = 1;", "#include <cmath>", "#include <cmath>"),
    Snippet(
        "a function of the host",
        "out[0] = atoi(0);",
        "call of a host function: atoi",
        'extern "C" int atoi(const char*);',
    ),
    Snippet("a builtin of the host", "out[0] = __builtin_expf(x[0]);", "builtin"),
    Snippet("variable-length array", "float a[small[0]]; a[0] = 1; out[0] = a[0];", "variable-length array"),
    Snippet(
        "static local variable",
        "static int n = 0; n++; out[0] = n;",
        "mutable program-scope or static variable",
    ),
    Snippet("mutable global variable", "out[0] = counter;", "mutable program-scope", "int counter = 0;"),
    Snippet(
        "global constant outside the constant space",
        "out[0] = K[small[0]];",
        "not in the constant address space",
        "const float K[2] = {1, 2};",
    ),
    Snippet(
        "constant in a function", "constant float k = 2.0f; out[0] = k;", "constant variable in a function"
    ),
    Snippet("threadgroup initialiser", "threadgroup float s[4] = {0}; out[0] = s[0];", NOT_COMPILED),
    Snippet(
        "threadgroup variable in a helper",
        "out[0] = f();",
        "outside the kernel's body",
        "inline float f() { threadgroup float s[4]; s[0] = 1; return s[0]; }",
    ),
    Snippet(
        "threadgroup variable in a nested scope",
        "if (x[0] > 0) { threadgroup float s[4]; s[0] = 1; out[0] = s[0]; }",
        "nested scope",
    ),
    Snippet(
        "float to bfloat, implicit", "float a = x[0]; bfloat b = a; out[0] = float(b);", "float to bfloat"
    ),
    Snippet("half to bfloat, implicit", "half h = 1.0h; bfloat b = h; out[0] = float(b);", NOT_COMPILED),
    Snippet("float4 to half4, implicit", "float4 a = float4(1.0f); half4 h = a; out[0] = h.x;", NOT_COMPILED),
    Snippet("max of float and int", "out[0] = max(x[0], 0);", NOT_COMPILED),
    Snippet("min of int and uint", "uint u = 3; out[0] = min(small[0], u);", NOT_COMPILED),
    Snippet("exp of an int", "out[0] = exp(small[0]);", NOT_COMPILED),
    Snippet(
        "designated initialiser",
        "S s = {.a = 1, .b = 2}; out[0] = s.a;",
        "designated initialiser",
        "struct S { int a; int b; };",
    ),
    Snippet("printf", 'printf("x"); out[0] = 1;', "printf"),
    Snippet("a vector of 32 bytes", "ulong4 v = ulong4(1ul); out[0] = v.x;", "more than 16 bytes"),
]

ACCEPTED = [
    Snippet(
        "device pointer", "out[0] = f1(x);", header="inline float f1(const device float* p) { return p[0]; }"
    ),
    Snippet(
        "a template takes both address spaces",
        "out[0] = f2(x) + f2(small);",
        header="template <typename P> inline float f2(P p) { return p[0]; }",
    ),
    Snippet("literals are float", "out[0] = x[0] * 0.1;"),
    Snippet("global constant", "out[0] = K1[small[0]];", header="constant constexpr float K1[2] = {1, 2};"),
    Snippet("half4 from float4", "half4 h = half4(float4(1.0f)); out[0] = h.x;"),
    Snippet("writing a swizzle", "float4 v = float4(0.0f); v.xz = float2(1, 2); out[0] = v.z;"),
    Snippet(
        "select by comparison", "float4 a = float4(1.0f); float4 b = select(a, -a, a > 0.5f); out[0] = b.x;"
    ),
    Snippet("reference into device memory", "device float& r = out[0]; r = 2;"),
    Snippet(
        "struct that holds a device pointer",
        "S1 s{x}; out[0] = s.get(1);",
        header="struct S1 { const device float* p; float get(int i) const { return p[i]; } };",
    ),
    Snippet(
        "members that say their address space, and one without an object",
        "S5 s; s.a = 1; out[0] = s.get(1) + S5::one();",
        header="struct S5 { int a; METAL_FUNC int get(int i) const thread { return a + i; }\n"
        "static METAL_FUNC int one() { return 1; } };",
    ),
    Snippet(
        "if constexpr and fold expressions",
        "if constexpr (sizeof(float) == 4) out[0] = f3(1.0f, 2.0f);",
        header="template <typename... A> inline float f3(A... a) { return (0 + ... + a); }",
    ),
    Snippet(
        "structured binding", "auto [p, q] = S2{1, 2}; out[0] = p + q;", header="struct S2 { int a, b; };"
    ),
    Snippet("arithmetic in half", "half h = x[0]; h = h * 0.5h + 1.0h; out[0] = h;"),
    Snippet("MLX's elem_to_loc", "out[0] = x[elem_to_loc(uint(1), x_shape, x_strides, x_ndim)];"),
    Snippet("a subscript and a block", "float a[2] = {1, 2}; if (a[0] > 0) { out[0] = a[1]; }"),
    Snippet("an alias of a vector type", "typedef vec<half, 4> h4; h4 v = h4(1.0h); out[0] = v.w;"),
    Snippet("a threadgroup variable", "threadgroup half s[2][4]; s[0][1] = 1.0h; out[0] = s[0][1];"),
]

INPUTS = [np.ones((4, 4), np.float32), np.ones(3, np.int32)]


def findings(snippet: Snippet) -> list[str]:
    return lint(
        "p",
        ["x", "small"],
        ["out"],
        snippet.body,
        header=snippet.header + "\n",
        inputs=INPUTS,
        output_dtypes=[np.float32],
    )


@needs_compiler
@pytest.mark.parametrize("snippet", REFUSED, ids=lambda snippet: snippet.label)
def test_metal_refuses(snippet: Snippet) -> None:
    found = findings(snippet)
    assert any(snippet.finding in finding for finding in found), found


@needs_compiler
@pytest.mark.parametrize("snippet", ACCEPTED, ids=lambda snippet: snippet.label)
def test_metal_accepts(snippet: Snippet) -> None:
    assert findings(snippet) == []


@needs_compiler
def test_sources_that_metal_accepts_run() -> None:
    emulate(
        "accepted",
        ["x", "small"],
        ["out"],
        "\n".join(f"{{ {snippet.body} }}" for snippet in ACCEPTED),
        header="\n".join(snippet.header for snippet in ACCEPTED) + "\n",
        inputs=INPUTS,
        output_shapes=[(8,)],
        output_dtypes=[np.float32],
        init_value=0,
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )


@needs_compiler
def test_too_many_buffers_are_a_finding() -> None:
    names = [f"b{i}" for i in range(31)]
    found = lint("p", names, ["out"], "out[0] = 1;", inputs=[1.0] * 31, output_dtypes=[np.float32])
    assert found == ["kernel 'p' has 32 buffers: Metal binds at most 31"]


def test_a_finding_names_its_line() -> None:
    assert lint_text("// goto\n", "out[0] = 1;\n/* double */ double d;\n") == [
        "body:2: double does not exist in Metal"
    ]
