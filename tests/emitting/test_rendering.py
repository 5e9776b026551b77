"""Emitted text: deterministic, readable by rule, accepted by both vendors' compilers."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f16, f32
from fusegen import ops as F
from fusegen.compiling import ptx
from fusegen.emitting.dialect import all_of
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.language.graph import Graph
from fusegen.language.reference import reference
from fusegen.language.spec import Chain
from fusegen.language.types import DTYPES, DType
from fusegen.planner import candidates, plan
from fusegen.planner.model import Layout, Plan, RowPlan
from fusegen.runtime.cache import compiled
from fusegen.targets import H200, MI300X, TARGETS, Target
from tests.chains import random_chain
from tests.sizes import sizes_at
from tests.specs import ALL, ROWS, planned, storage_types

SPECS = tuple(ALL.values())
(N,) = dims("N")


def str_or_name(value: object) -> str:
    return value.name if isinstance(value, Chain) else str(value)


def compiles(made: Plan) -> None:
    try:
        binary = compiled(render(made), origin=made.regime)  # from the cache, where another test has compiled it
    except MissingError as missing:
        pytest.skip(str(missing).splitlines()[0])
    assert binary.resources.static_shared_bytes == made.static_shared_bytes
    unused = re.findall(r'variable "\w+" was (?:declared but never referenced|set but never used)', binary.log)
    assert not unused, binary.log


def test_same_plan_same_text(target: Target) -> None:
    for spec in SPECS:
        if not planned(spec, target):
            continue
        assert render(plan(spec.graph, target)).text == render(plan(spec.graph, target)).text


def test_no_function_of_a_kernel_has_a_parameter_that_it_does_not_use(target: Target) -> None:
    function = re.compile(r"^( *)const auto (\w+) = \[&\]\((.*?)\).*? \{\n(.*?)^\1\};", re.MULTILINE | re.DOTALL)
    for spec in SPECS:
        if not planned(spec, target):
            continue
        for _, name, parameters, body in function.findall(render(plan(spec.graph, target)).text):
            for parameter in re.findall(r"\w+$|\w+(?=,)", parameters):
                assert re.search(rf"\b{parameter}\b", body), f"{spec.name}: {name} has no use for {parameter}"


def test_every_load_of_a_whole_vector_is_issued_before_the_first_use() -> None:
    """A load with a branch of its own would wait for the one before it, where halves are taken apart on arrival."""
    flat = render(plan(ALL["swiglu_elementwise"].graph, H200)).text
    whole, end = flat[flat.index("// pass 1") :].split("} else if (col < n) {")
    assert re.findall(r"(\w+)_vec = load<8>\(", whole) == ["gate", "up"]
    assert "load_last<8>(gate_ptr, col, n)" in end
    assert "within" not in whole
    causal = ALL["scale_causal_softmax"].graph
    held = next(p for p in candidates(causal, H200).plans if isinstance(p, RowPlan) and p.staging == "registers")
    assert re.search(
        r"scores_vec\[v\] = load_evict_first_where<8>\(col <= last, scores_row \+ col\);", render(held).text
    )
    wide = next(
        p for p in candidates(ALL["scale_causal_softmax"].with_dtype(f32).graph, H200).plans
        if isinstance(p, RowPlan) and p.staging == "registers"
    )  # fmt: skip
    assert "col <= last ? load_evict_first<4>(scores_row + col)" in render(wide).text, "words are not taken apart"


def test_an_element_is_computed_alike_wherever_the_array_ends() -> None:
    """0.9 a + 0.1 b is one product and one fused sum, of either product. A zero for what lies behind the end, or a test
    of each element, moved a product into a block of its own, and the other one was fused there alone."""

    @chain(N=4096)
    def mixed(a: f32[N], b: f32[N]) -> f32[N]:
        return 0.9 * a + 0.1 * b

    source = render(plan(mixed.graph, H200))
    try:
        text = ptx(source.text, H200, filename=source.filename)
    except MissingError as missing:
        pytest.skip(str(missing).splitlines()[0])
    assert len(re.findall(r"\bmul\.f32", text)) == len(re.findall(r"\bfma\.rn\.f32", text)) == 2 * 4
    assert "add.f32" not in text


def test_text_does_not_depend_on_hash_seeds() -> None:
    code = (
        "import hashlib\nfrom fusegen.planner import plan\nfrom fusegen.emitting.rendering import render\n"
        "from fusegen.targets import H200\nfrom tests.specs import ALL\n"
        "text = ''.join(render(plan(c.graph, H200)).text for c in ALL.values())\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    seen = set()
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        seen.add(done.stdout)
    assert len(seen) == 1


def unused(text: str) -> str:
    """The first number that a line names and that no line of its block uses."""
    for found in re.finditer(r"^( *)const (?:int|unsigned|float|bool) (\w+) = .*\n((?:(?:\1.*|#.*)?\n)*)", text, re.M):
        if not re.search(rf"\b{found[2]}\b", found[3]):
            return found[2]
    return ""


def reads_like_code(made: Plan) -> None:
    graph, text = made.graph, render(made).text
    assert text.startswith(f"// {graph.name}  ")
    assert not re.search(r"[ \t]$", text, re.M), "no trailing blanks"
    assert "\n\n\n" not in text
    assert not re.search(r"\{\n\n", text)
    assert not re.search(r"^\}\n(?!\n|$)", text, re.M), "a blank line between functions"
    assert text.count("{") == text.count("}")
    assert max(map(len, text.splitlines())) <= 140
    assert "None" not in text
    assert not re.search(r"^( *)#pragma unroll.*\n(?!\1\S)", text, re.M), "what is unrolled stands below"
    inside = re.search(r"^( *)(?:for|if|while) .*\{(?:  //.*)?\n(?!\1  \S|#)", text, re.M)
    assert not inside, "what is in braces stands further right"
    assert not (lines := mixing_tests(text)), f"{made.regime}: || binds less tightly than && in {lines}"
    assert not (found := unused(text)), f"{made.regime}: {found} is never used"
    for tensor in (*graph.inputs, *graph.outputs):
        assert re.search(rf"\b{tensor.name}\w*\b", text)


def mixing_tests(text: str) -> list[str]:
    """The lines in which && and || stand side by side, without brackets between them."""
    found, inner = [], re.compile(r"\(([^()]*)\)")
    for line in text.splitlines():
        whole, parts = line.split("//")[0], []
        while part := inner.search(whole):
            parts.append(part[1])
            whole = inner.sub("", whole, count=1)
        found += [line for part in (*parts, whole) if "&&" in part and "||" in part]
    return found


def test_tests_are_joined_with_brackets(target: Target) -> None:
    assert all_of("live", "v < 1 || col + 2 <= 13") == "live && (v < 1 || col + 2 <= 13)"
    assert all_of("", "v < 1 || col + 2 <= 13") == "v < 1 || col + 2 <= 13"
    assert all_of("(a || b)", "c < (d ? e : f)", "") == "(a || b) && c < (d ? e : f)"
    assert mixing_tests("if (live && v < 1 || col + 2 <= 13) {")
    for spec in ROWS.values():
        for made in candidates(spec.graph.at(**sizes_at(spec.graph, 13)), target).plans:
            assert not mixing_tests(render(made).text), made.configuration
    joining = [file.name for file in Path("fusegen").rglob("*.py") if '" && ".join' in file.read_text()]
    assert joining == ["dialect.py"]


@pytest.mark.parametrize("spec", SPECS, ids=lambda c: c.name)
def test_text_reads_like_code(spec: Chain, target: Target) -> None:
    for cols in (37, 4096, 5001, 131072):
        for made in candidates(spec.graph.at(**sizes_at(spec.graph, cols)), target).plans[::20]:
            reads_like_code(made)


@pytest.mark.parametrize(("dtype", "cols"), [("f16", 4096), ("bf16", 5120), ("f32", 2048)])
def test_few_rows_read_like_code_and_compile(dtype: str, cols: int) -> None:
    """Where vectors are prefetched by bulk copies, which the specs' own sizes are too large for."""
    graph = ALL["bias_gelu_residual_ln"].with_dtype(DTYPES[dtype]).at(M=512, N=cols).graph
    prefetching = [made for made in candidates(graph, H200).plans if isinstance(made, RowPlan) and made.prefetched]
    assert prefetching
    for made in prefetching:
        reads_like_code(made)
        compiles(made)


WAYS = tuple(f"type {number} for {target}" for number in range(3) for target in (H200, MI300X))


@pytest.mark.by_values("spec", "way")  # in its own type, tests of golden sources compile each for each target
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", SPECS, ids=str_or_name)
def test_every_spec_compiles(spec: Chain, way: str) -> None:
    types, place = storage_types(spec), WAYS.index(way)
    dtype, gpu = types[place // 2 % len(types)], (H200, MI300X)[place % 2]
    if planned(spec, gpu):
        compiles(plan(spec.with_dtype(DTYPES[dtype]).graph, gpu))


@pytest.mark.parametrize(
    "layout", [Layout(split=True), Layout(unaligned=frozenset({"scores", "x", "out"}))], ids=["split", "unaligned"]
)
def test_variants_compile(layout: Layout, target: Target) -> None:
    for spec in SPECS:
        if spec.name in ("masked_softmax", "bias_gelu_residual_ln", "swiglu_elementwise"):
            compiles(plan(spec.graph, target, layout))


@pytest.mark.parametrize("staging", ["registers", "shared", "stream"])
@pytest.mark.parametrize(("name", "cols"), [("bias_gelu_residual_ln", 4096), ("log_softmax", 5001)])
def test_every_staging_compiles(staging: str, name: str, cols: int, target: Target) -> None:
    graph = ROWS[name].graph
    made = candidates(graph.at(**{str(graph.shape[-1]): cols}), target).plans
    compiles(next(p for p in made if isinstance(p, RowPlan) and p.staging == staging))


@pytest.mark.parametrize("seed", range(16, 20))
def test_random_chains_compile(seed: int) -> None:
    """What a host compiler accepts in the emulator, NVRTC or hiprtc may refuse: both must see random text too. (They do
    in test_fuzzing.py, which goes through other chains; here also without the emulator.)"""
    graph = random_chain(seed).graph
    for target, cols in ((H200, 20), (H200, 1000), (MI300X, 333)):
        compiles(plan(graph.at(N=cols), target))


def test_templates_ask_no_names() -> None:
    """Decisions live in the planner: a kernel's template that tests a target, a dtype or does arithmetic has missed a
    field. Pages (templates/report) and launchers in C (templates/export) are of another kind."""
    kernels = [f for f in Path("templates").rglob("*.j2") if f.parts[1] not in ("report", "export")]
    assert len(kernels) > 20
    for file in kernels:
        text = file.read_text()
        assert not re.search(r"cuda|hip|nvidia|amd|\b(f16|bf16|f32|i32|b8)\"", re.sub(r"\.cu\.j2", "", text), re.I), (
            file
        )
        for value in re.findall(r"{%-? set \w+ = (.*?) -?%}", text):  # what a block says may have a name
            assert value == "caller()", file


@pytest.mark.parametrize(
    "name", ["std", "exp", "expf", "float", "row", "memcpy", "softmax", "lambda_", "half", "x", "NULL", "_Bool", "np"]
)
def test_chains_and_values_may_have_any_name(name: str, target: Target) -> None:
    """Names that C++, a runtime compiler or the kernel's own frame has taken step aside."""
    first = "y" if name == "x" else "x"
    body = (
        "from fusegen import chain, dims, f16\nfrom fusegen import ops as F\nM, N = dims('M N')\n"
        f"@chain(M=3, N=50)\ndef {name}({first}: f16[M, N], expf: f16[N], tile: f16[M, 1]) -> f16[M, N]:\n"
        f"    {name} = F.exp({first}) + expf * tile\n    lane = {name} / F.sum({name})\n    return lane\n"
    )
    module: dict[str, object] = {"__name__": "named"}
    exec(compile(body, "named.py", "exec"), module)
    graph = trace_named(module, name)
    compiles(plan(graph, target))
    reference(graph)(np.ones((3, 50)), np.ones(50), np.ones((3, 1)))


@pytest.mark.by_values("spec", "dtype")  # stores are of one text for each type
@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
@pytest.mark.parametrize("spec", ROWS.values(), ids=lambda c: c.name)
def test_blocks_of_rows_that_start_anywhere_are_written_whole(spec: Chain, dtype: DType) -> None:
    """NVRTC may take a vector apart into stores of 2 or 4 bytes, which nothing but its own text shows."""
    graph = spec.with_dtype(dtype).graph
    found = candidates(graph.at(**sizes_at(graph, 2047)), H200).plans
    rows = [p for p in found if isinstance(p, RowPlan) and p.misaligned_rows and p.tile.vector == 16 // dtype.bytes]
    for made in rows[: 3 if dtype is f16 else 1]:
        source = render(made)
        try:
            text = ptx(source.text, H200, filename=source.filename)
        except MissingError as missing:
            pytest.skip(str(missing).splitlines()[0])
        whole = [a.name for a in made.accesses if a.output and a.vector_bytes == 16]  # 8 bits beside f32 have 4 bytes
        row = rf"\(({'|'.join(whole)})_row" if whole else "$^"
        stores = len(re.findall(rf"(store_misaligned|store_row|store)(<.+>)?{row}.*;$", source.text, re.MULTILINE))
        assert stores or not any(a.mode == "misaligned" for a in made.accesses if a.name in whole)
        assert len(re.findall(r"st\.global\.v4", text)) >= stores, made.regime


@pytest.mark.parametrize("name", ["masked_softmax", "additive_mask_softmax", "scale_causal_softmax"])
def test_rows_of_several_dimensions_are_written_whole(name: str) -> None:
    """Where a block has several of them NVRTC wrote the first vector of each thread by 2 bytes: a causal softmax of
    192 x 512 x 512 took 53.6 us so and 42.9 whole, rotated halves of heads of 64 73.0 and 71.8."""
    graph = ROWS[name].graph
    found = candidates(graph.at(**sizes_at(graph, 512)), H200).plans
    rows = [p for p in found if isinstance(p, RowPlan) and p.rows_per_block > 1 and p.tile.vector == 8]
    for made in rows[:3]:
        source = render(made)
        try:
            text = ptx(source.text, H200, filename=source.filename)
        except MissingError as missing:
            pytest.skip(str(missing).splitlines()[0])
        assert not re.findall(r"st\.global\.(?:v2\.)?[ub](?:16|32)\b", text), made.regime
    assert rows


def trace_named(module: dict[str, object], name: str) -> Graph:
    chain = module[name]
    assert isinstance(chain, Chain)
    return chain.graph


M, N, K = dims("M N K")


@chain(M=64, N=64)
def rounded_row(x: bf16[M, N]) -> bf16[M, N]:
    return F.softmax(F.cast(x * 3.0, f16))


@chain(M=64, N=64, K=64)
def rounded_product(x: bf16[M, K], w: bf16[K, N]) -> bf16[M, N]:
    return F.cast(x @ w, f16) + 1.0


@pytest.mark.parametrize("spec", [rounded_row, rounded_product], ids=str_or_name)
def test_a_type_that_only_a_cast_names_has_its_header(spec: Chain) -> None:
    by_rule = {made.rule: made for made in reversed(candidates(spec.graph, H200).plans)}
    for made in by_rule.values():
        compiles(made)


@pytest.mark.by_values("gpu", "cols")  # functions stand in front of every kernel by one rule
@pytest.mark.parametrize("cols", [37, 1000, 4096, 5001, 131072])
@pytest.mark.parametrize("gpu", ["cuda:h200", "hip:mi300x"])
def test_no_function_stands_in_front_of_a_kernel_that_calls_it_nowhere(gpu: str, cols: int) -> None:
    for spec in SPECS:
        graph = spec.graph.at(**sizes_at(spec.graph, cols))
        plans = candidates(graph, TARGETS[gpu]).plans
        for made in (*plans[:3], *plans[8::18]):
            text = render(made).text
            for name in re.findall(r"__forceinline__ [^(]*?(\w+)\(", text):
                assert len(re.findall(rf"\b{name}\b *[<(]", text)) > 1, f"{made.regime}: {name} is never called"


def test_whatever_a_body_says_it_is_a_comment(target: Target) -> None:
    """Ends that compilers join to the next line, ends of comments, other alphabets; and not too much of it."""
    lines = [
        "def scaled(x):",
        "    y = x * \\",
        "        2  # */ /* \u03bc \u65e5 ??/",
        '    "// %0 __shared__"',
        "    y += 0 \\",
    ]

    @chain(N=64)
    def scaled(x: f32[N]) -> f32[N]:
        return x * 2

    long = [*lines, *("    y += 0" for _ in range(40))]
    for body in (lines, long):
        made = plan(replace(scaled.graph, body="\n".join(body)), target)
        text = render(made).text
        assert "//         y = x * \\ //\n//             2  # */ /* \u03bc \u65e5 ??/ //\n" in text
        assert ("//         ...  # 16 more lines\n//\n" in text) == (body is long)
        compiles(made)
    assert "def scaled" not in render(plan(replace(scaled.graph, body=""), target)).text
