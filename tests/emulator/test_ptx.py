"""Inline PTX in the emulator: how it is read, and what its arithmetic gives."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fusegen.emulator import Buffer, EmulatorBuildError, build
from fusegen.emulator.ptx import rewrite_asm
from fusegen.targets import H200
from tests.programs import Program, aligned, compile_all_for, compile_cuda, require_right
from tests.tools import BUILDS, needs_compiler

pytestmark = needs_compiler

Floats = npt.NDArray[np.float32]

# --- how it is read


def test_a_statement_becomes_a_call_on_its_own_line() -> None:
    asm = 'asm("ex2.approx.ftz.f32 %0,"\n      " %1;" : "=f"(y)\n : "f"(x + 1));'
    source = f"float f(float x) {{\n  float y;\n  {asm}\n  return y;\n}}\n"
    made = rewrite_asm(source)
    assert made.count("\n") == source.count("\n")
    assert made.splitlines()[2].startswith("  { float simt_0; float simt_1 = simt::ptx_in<float>(x + 1);")
    assert "simt::ptx_ex2_approx_ftz_f32(simt_0, simt_1); simt::ptx_out(y, simt_0); }" in made
    assert made.splitlines()[5] == "  return y;"


def test_text_without_asm_is_unchanged() -> None:
    source = 'int asmodeus; // asm("a;")\n/* asm("b;"); */ auto s = "asm(1);";\n'
    assert rewrite_asm(source) == source


READ = [
    Program("immediates, registers, predicates", """unsigned r = 0;
asm volatile("{\\n\\t.reg .pred p;\\n\\t.reg .b32 t; // a comment\\n\\t"
             "setp.ne.u32 p, %1, 3;\\n\\tselp.u32 t, 0x10, 2, p;\\n\\t"
             "@!p mov.u32 t, 7;\\n\\tmov.b32 %0, t;\\n}" : "=r"(r) : "r"(threadIdx.x) : "memory");
y[threadIdx.x] = r;""", lambda x: np.where(np.arange(128) == 3, 7, 16)),
    Program("labels and branches, twice in a function", 'unsigned a = 0, b = 0;\n'
            'asm("{ .reg .pred p; setp.eq.u32 p, %1, 5; @p bra DONE; mov.u32 %0, 1; DONE: }" : "+r"(a) '
            ': "r"(threadIdx.x));\n'
            'asm("{ .reg .pred p; setp.eq.u32 p, %1, 6; @p bra DONE; mov.u32 %0, 1; bra.uni DONE; DONE: }" : "+r"(b)'
            ' : "r"(threadIdx.x));\ny[threadIdx.x] = a + 2 * b;',
            lambda x: (np.arange(128) != 5) + 2 * (np.arange(128) != 6)),
    Program("a template's constant, a float literal, the dangling else",
            'if (threadIdx.x % 2)\n  asm("mov.f32 %0, 0f3fc00000;" : "=f"(y[threadIdx.x]));\nelse\n'
            '  y[threadIdx.x] = twice<21>();',
            lambda x: np.where(np.arange(128) % 2, 1.5, 42),
            before='template <int N> __device__ unsigned twice() {\n  unsigned r;\n'
                   '  asm("mov.u32 %0, %1;" : "=r"(r) : "n"(2 * N));\n  return r;\n}\n'),
    Program("a load that hints at the caches", """unsigned long long policy;
asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
uint4 bits;
asm("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
    : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w) : "l"(x + threadIdx.x / 4 * 4), "l"(policy));
const unsigned each[4] = {bits.x, bits.y, bits.z, bits.w};
y[threadIdx.x] = __int_as_float(each[threadIdx.x % 4]);""", lambda x: x[:128]),
    Program("a store of four words", """if (threadIdx.x % 4 == 0) {
  const uint4 bits = *reinterpret_cast<const uint4*>(x + threadIdx.x);
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
      :: "l"(y + threadIdx.x), "r"(bits.w), "r"(bits.z), "r"(bits.y), "r"(bits.x));
}""", lambda x: x[:128].reshape(-1, 4)[:, ::-1].reshape(-1)),
    Program("a load from shared memory", """__shared__ float words[128];
words[threadIdx.x] = x[threadIdx.x];
__syncthreads();
const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(words + 127)) - 4 * threadIdx.x;
unsigned bits;
asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
y[threadIdx.x] = __uint_as_float(bits);""", lambda x: x[127::-1]),
    Program("an empty statement is a fence for the compiler", 'asm volatile("" ::: "memory");\ny[threadIdx.x] = 1.0f;',
            lambda x: np.ones(128)),
]  # fmt: skip


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("program", READ, ids=lambda program: program.name)
def test_forms_of_statements(program: Program, check: bool) -> None:
    require_right(program, check=check)


def test_the_forms_are_cuda() -> None:
    compile_all_for(H200, [program.source for program in READ])


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ('asm("lop3.b32 %0, %0, %0, %0, 0x80;" : "+r"(i));', r"no model of the instruction lop3\.b32: add it in"),
        ('asm volatile(\n"mov.b32 %0, 1;\\n\\t" "bfind.u32 %0, %0;" : "=r"(i));', r"instruction bfind\.u32: add it"),
        ('asm("mov.u32 %0, %%laneid;" : "=r"(i));', r"operand %laneid of `mov\.u32 %0, %laneid`"),
        ('asm("mov.u32 %0, %1;" : "=r"(i));', "operand %1 of"),
        ('asm("mov.u32 %0, q;" : "=r"(i));', "operand q of"),
        ('asm("mov.u32 %0, 1" : "=r"(i));', "`mov.u32 %0, 1` has no semicolon"),
        ('asm("mov.u32 %0, 1;" : "=w"(i));', 'constraint "=w" is none of'),
        ('asm("{ .reg .v4 q; }" ::);', r"`\.reg \.v4 q` declares no register"),
        ('asm(TEXT);', "must be plain string literals"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_its_line(statement: str, says: str) -> None:
    source = f'extern "C" __global__ void kernel(int* y) {{\n  int i = 1;\n  {statement}\n  *y = i;\n}}\n'
    with pytest.raises(EmulatorBuildError, match=rf"^refused\.cu: line 3: .*{says}"):
        build(source, "kernel", warp=32, check=False, filename="refused.cu")


def test_asm_in_a_macro_is_refused() -> None:
    with pytest.raises(EmulatorBuildError, match=r"line 3: .*asm in a macro"):
        rewrite_asm('int x;\n#define EX2(y, x) \\\n  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x))\n')


def test_an_operand_of_another_width_is_refused() -> None:
    source = 'extern "C" __global__ void kernel(float* y) { asm("mov.u32 %0, 1;" : "=r"(*(double*)y)); }'
    with pytest.raises(EmulatorBuildError, match="not as wide as its constraint"):
        build(source, "kernel", warp=32, check=False, filename="wide.cu")


# --- arithmetic


def floats() -> Floats:
    """Every exponent and sign, zeros, subnormals, infinities, NaN."""
    bits = np.random.default_rng(1).integers(0, 2**32, 60000, dtype=np.uint32)
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.17e-38, -1.17e-38, 1.1754944e-38, 3.4e38]
    small = np.random.default_rng(2).uniform(-4, 4, 6000).astype(np.float32)
    return np.concatenate([np.array(special, np.float32), small, bits.view(np.float32)])


def apply(statement: str, *inputs: Floats, headers: str = "") -> Floats:
    """`statement` for each a (and b, c); it sets d."""
    names = "abc"[: len(inputs)]
    parameters = ", ".join(f"const float* {name}s" for name in names)
    reads = " ".join(f"float {name} = {name}s[i];" for name in names)
    source = (f'{headers}extern "C" __global__ void kernel({parameters}, float* ds, int n) {{\n'
              f"  for (int i = threadIdx.x; i < n; i += blockDim.x) {{\n"
              f"    {reads}\n    float d;\n    {statement}\n    ds[i] = d;\n  }}\n}}\n")  # fmt: skip
    if not headers:
        compile_cuda(source)
    kernel = build(source, "kernel", warp=32, check=False, filename="arithmetic.cu")
    arrays = [*map(aligned, inputs), aligned(np.zeros_like(inputs[0]))]
    buffers = [Buffer(f"a{i}", each.ctypes.data, each.ctypes.data, each.nbytes) for i, each in enumerate(arrays)]
    kernel.launch((1, 1, 1), (64, 1, 1), 0, [*buffers, ctypes.c_int(inputs[0].size)])
    return arrays[-1]


def flush(x: Floats) -> Floats:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def same(got: Floats, want: Floats) -> bool:
    """Bit for bit, but that one NaN is as good as another."""
    nan = np.isnan(want)
    return bool(np.array_equal(np.isnan(got), nan)) and bool(
        np.array_equal(got[~nan].view(np.uint32), want[~nan].view(np.uint32))
    )


FUNCTIONS: dict[str, Any] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
}


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_approximate_functions(name: str, ftz: bool) -> None:
    x = floats()
    got = apply(f'asm("{name}.approx{".ftz" * ftz}.f32 %0, %1;" : "=f"(d) : "f"(a));', x)
    with np.errstate(all="ignore"):
        exact = FUNCTIONS[name]((flush(x) if ftz else x).astype(np.float64)).astype(np.float32)
    assert same(got, flush(exact) if ftz else exact)
    assert np.all(got.view(np.uint32)[np.isnan(got)] == 0x7FFFFFFF)


def test_special_values_are_those_of_the_manual() -> None:
    x = np.array([-np.inf, np.inf, -0.0, 0.0, 1e-45, -1e-45], np.float32)
    inf, nan = np.inf, np.nan
    want = {"ex2": [0.0, inf, 1, 1, 1, 1], "rcp": [-0.0, 0.0, -inf, inf, inf, -inf],
            "lg2": [nan, inf, -inf, -inf, -inf, -inf], "rsqrt": [nan, 0.0, -inf, inf, inf, -inf]}  # fmt: skip
    for name, values in want.items():
        got = apply(f'asm("{name}.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));', x)
        assert same(got, np.array(values, np.float32)), name


def test_tanh_has_the_error_that_is_documented() -> None:
    x = np.concatenate([np.linspace(-9, 9, 20001), [np.inf, -np.inf, 1e-40, -0.0, 1e-6]]).astype(np.float32)
    got = apply('asm("tanh.approx.f32 %0, %1;" : "=f"(d) : "f"(a));', x)
    exact = np.tanh(x.astype(np.float64))
    error = np.abs(got - exact)[x != 0] / np.abs(exact[x != 0])
    assert error.max() <= 2.0**-11
    assert error.max() >= 2.0**-12
    assert np.isnan(apply('asm("tanh.approx.f32 %0, %1;" : "=f"(d) : "f"(a));', np.array([np.nan], np.float32)))[0]


@pytest.mark.parametrize("form", ["rna", "rn"])
def test_the_nearest_tf32(form: str) -> None:
    ties = np.arange(0x3F800000, 0x3F820000, 0x1000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([floats(), ties, -ties])
    finite = x[np.isfinite(x)].astype(np.float64)
    convert = f'unsigned bits; asm("cvt.{form}.tf32.f32 %0, %1;" : "=r"(bits) : "f"(a)); d = __uint_as_float(bits);'
    got = apply(convert, x)
    digit = np.exp2(np.floor(np.log2(np.maximum(np.abs(finite), 2.0**-126))) - 10)
    whole = np.abs(finite) / digit
    nearest = np.floor(whole + 0.5) if form == "rna" else np.round(whole)
    with np.errstate(over="ignore"):
        want = np.copysign(nearest * digit, finite).astype(np.float32)
    assert same(got[np.isfinite(x)], want)
    assert same(got[np.isinf(x)], x[np.isinf(x)])
    assert np.isnan(got[np.isnan(x)]).all()
    assert not (got.view(np.uint32) & 0x1FFF).any()


@pytest.mark.parametrize("name", ["max", "min"])
def test_the_larger_and_the_smaller(name: str) -> None:
    values = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40], np.float32)
    a, b = (grid.ravel().astype(np.float32) for grid in np.meshgrid(values, values))
    zeros = (a == 0) & (b == 0)
    positive = np.signbit(a) & np.signbit(b) if name == "max" else np.signbit(a) | np.signbit(b)
    for form, plain in ((f"{name}.NaN.f32", np.maximum), (f"{name}.f32", np.fmax)):
        choose = plain if name == "max" else {np.maximum: np.minimum, np.fmax: np.fmin}[plain]
        want = np.where(zeros, np.where(positive, np.float32(-0.0), np.float32(0)), choose(a, b)).astype(np.float32)
        assert same(apply(f'asm("{form} %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));', a, b), want), form


def test_amd_builtins() -> None:
    headers = "#include <hip/hip_runtime.h>\n"
    x = floats()
    for name, function in {"exp2f": "ex2", "rcpf": "rcp", "logf": "lg2", "rsqf": "rsqrt"}.items():
        got = apply(f"d = __builtin_amdgcn_{name}(a);", x, headers=headers)
        with np.errstate(all="ignore"):
            exact = flush(FUNCTIONS[function](flush(x).astype(np.float64)).astype(np.float32))
        assert same(got, exact), name
    a, b, c = (grid.ravel().astype(np.float32) for grid in np.meshgrid([1, -2, 3.5], [0, 2], [-5, 1, 9]))
    got = apply("d = __builtin_amdgcn_fmed3f(a, b, c) + 0 * __builtin_fmaxf(a, b);", a, b, c, headers=headers)
    assert np.array_equal(got, np.median([a, b, c], axis=0))
    some = [np.array(values, np.float32) for values in ([np.nan] * 3, [1, 2, 3], [2, 1, 7])]
    got = apply("d = __builtin_amdgcn_fmed3f(a, b, c);", *some, headers=headers)
    assert np.array_equal(got, [1, 1, 3])
