"""Grouped products by weights in codes, each group of rows by its own expert's codes and scales, against their law."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegen
from fusegen import Chain, bf16, chain, dims, f4e2m1, f8e4m3, f8e8m0, f16, f32, i4, i8, i32, u4
from fusegen import ops as F
from fusegen.language.codes import codes_of
from fusegen.language.types import size_of
from fusegen.runtime import Program
from fusegen.targets import target
from fusegen.validation import validate
from tests import grouped
from tests.emitting.test_codes import bits_of
from tests.emitting.test_quantized_products import one_kernel
from tests.emitting.test_row_parts import built
from tests.specs import SHIPPED

pytestmark = pytest.mark.usefixtures("emulated_only")

T, N, K, E = dims("T N K E")
H, A, AMD = "cuda:h200", "cuda:a100", "hip:mi300x"


@chain(T=70, N=72, K=256, E=3)
def of_four(x: bf16[T, K], w: i4[E, N, K], s: bf16[E, N, K // 32], ends: i32[E]) -> f32[T, N]:
    return F.grouped_matmul(x, F.dequantize(w, s).mT, ends)


@chain(T=70, N=72, K=224, E=3)
def mx(x: bf16[T, K], w: f4e2m1[E, N, K], s: f8e8m0[E, N, K // 32], ends: i32[E], b: f32[E, N]) -> f32[T, N]:
    return F.grouped_matmul(x, F.dequantize(w, s).mT, ends, b)


@chain(T=70, N=72, K=384, E=3)
def zeroed(
    x: f16[T, K], w: u4[E, N, K], s: f32[E, N, K // 64], z: u4[E, N, K // 64], ends: i32[E]
) -> f32[T, N]:  # fmt: skip
    return F.grouped_matmul(x, F.dequantize(w, s, z).mT, ends)


@chain(T=70, N=72, K=256, E=3)
def of_eight(x: f16[T, K], w: i8[E, N, K], s: f32[E, N, 1], ends: i32[E]) -> f32[T, N]:
    """One scale a column."""
    return F.grouped_matmul(x, F.dequantize(w, s).mT, ends)


@chain(T=70, N=72, K=256, E=3)
def of_floats(x: bf16[T, K], w: f8e4m3[E, N, K], s: f32[E, N, K // 128], ends: i32[E]) -> f32[T, N]:
    return F.grouped_matmul(x, F.dequantize(w, s).mT, ends)


@chain(T=70, N=72, K=256, E=3)
def gated(
    x: bf16[T, K], g: i4[E, N, K], u: i4[E, N, K], gs: bf16[E, N, K // 32], us: bf16[E, N, K // 32], ends: i32[E]
) -> f32[T, N]:  # fmt: skip
    gate, up = (F.grouped_matmul(x, F.dequantize(w, s).mT, ends) for w, s in ((g, gs), (u, us)))
    return F.relu(gate) * up


@chain(T=70, N=72, K=256, E=3)
def batched(x: bf16[E, T, K], w: i4[E, N, K], s: bf16[E, N, K // 32]) -> f32[E, T, N]:
    """No groups of rows: each matrix has rows of its own."""
    return x @ F.dequantize(w, s).mT


SPECS = (of_four, mx, zeroed, of_eight, of_floats, gated)


@pytest.mark.parametrize("at", [H, A])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_one_kernel_is_right(spec: Chain, at: str) -> None:
    report = validate(built(one_kernel(spec, at, "gemm")), cases=("normal", "rows", "malice"))
    assert report.ok, str(report)[:2000]


@pytest.mark.parametrize("spec", [of_four, mx, of_eight], ids=lambda spec: spec.name)
def test_what_begins_anywhere_is_right(spec: Chain) -> None:
    made = fusegen.compile(spec, H, on="emulator", tuned=False, validate=False)
    report = validate(made, cases=("layout",))
    assert report.ok, str(report)[:2000]


def operands(spec: Chain, rows: int, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """As the kernel takes them, and as the numbers that they are: products and sums of them are exact in any order."""
    stored: dict[str, Any] = {}
    known: dict[str, Any] = {}
    codes = [found for n in spec.graph.products if (found := codes_of(n.inputs[1]))]
    kinds = {side.node: side.packed for c in codes for side in (c.codes, c.scales, c.zeros) if side}
    for tensor in spec.graph.inputs:
        packed = kinds.get(tensor.node)
        sizes = {**spec.graph.sizes, "T": rows}
        *lead, cols = (size_of(size, sizes) for size in tensor.shape)
        shape = (*lead, cols * (2 if packed else 1))
        if packed or tensor.dtype in (i8, f8e4m3) or tensor.name == "x":
            low, high = (0, 4) if packed is u4 else (-3, 4)
            known[tensor.name] = rng.integers(low, high, shape).astype(np.float64)
            stored[tensor.name] = bits_of(known[tensor.name], packed or tensor.dtype)
        elif tensor.name != "ends":
            known[tensor.name] = np.exp2(rng.integers(-2, 3, shape))
            stored[tensor.name] = known[tensor.name].astype(tensor.dtype.numpy)
        else:
            stored["ends"] = known["ends"] = np.zeros(shape, np.int32)
    return stored, known


def law(spec: Chain, known: dict[str, Any]) -> np.ndarray:
    """By the definition: scales and zeros spread over their groups of K."""

    def product(w: Any, s: Any, z: Any = None, bias: Any = None) -> np.ndarray:
        each = w.shape[-1] // s.shape[-1]
        whole = (w - (z.repeat(each, -1) if z is not None else 0)) * s.repeat(each, -1)
        return grouped.by_definition(known["x"], whole.swapaxes(1, 2), known["ends"], bias)

    if spec is gated:
        both: np.ndarray = np.maximum(product(known["g"], known["gs"]), 0) * product(known["u"], known["us"])
        return both
    return product(known["w"], known["s"], known.get("z"), known.get("b"))


@cache
def made(number: int) -> Program:
    spec = SPECS[number]
    return built(one_kernel(spec, A if spec in (zeroed, of_eight) else H, "gemm"))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(data=st.data(), number=st.integers(0, len(SPECS) - 1))
def test_any_ends(data: st.DataObject, number: int) -> None:
    """Ragged and empty groups, groups of one row, ends that are wrong: bit for bit."""
    rows = data.draw(st.sampled_from([1, 8, 33, 65]) | st.integers(1, 100))
    near = st.integers(-2, rows + 2) | st.sampled_from([-(2**31), 2**31 - 1])
    ends = data.draw(st.lists(near, min_size=3, max_size=3))
    spec = SPECS[number]
    stored, known = operands(spec, rows, np.random.default_rng(data.draw(st.integers(0, 99))))
    stored["ends"][:] = sorted(ends) if data.draw(st.booleans()) else ends
    assert np.array_equal(made(number)(*stored.values()), law(spec, known))


MISTAKES = {
    "the first expert's codes": (of_four, r"segment \* w_group", "0 * w_group"),
    "the next expert's scales": (of_four, r"segment \* s_value_group", "(segment + 1) % segments * s_value_group"),
    "the first expert's scales": (mx, r"segment \* s_value_group", "0 * s_value_group"),
    "scales of the next group of K": (mx, r"k_at / scaled_k", "(k_at / scaled_k + 1) % 7"),
    "the first expert's zeros": (zeroed, r"segment \* z_group", "0 * z_group"),
    "nibbles swapped": (of_four, r"words\[0\] >> i \* 4", "words[0] >> (i ^ 1) * 4"),
    "the first expert's scales of eight bits": (of_eight, r"segment \* s_value_group", "0 * s_value_group"),
    "gate's scales beside up's codes": (gated, r"\(us_ptr \+", "(gs_ptr +"),
}


@pytest.mark.parametrize(("spec", "wrong", "right"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_caught(spec: Chain, wrong: str, right: str) -> None:
    broken = built(one_kernel(spec, H, "gemm"), (wrong, right))
    assert not validate(broken, cases=("normal", "rows", "malice")).ok


def test_few_rows_read_the_codes_that_they_touch() -> None:
    """GPT-OSS's experts: one kernel, and two of many rows and on AMD."""
    spec = SHIPPED["grouped_mxfp4"]
    few: Any = fusegen.plan(spec.at(T=32), H, tuned=False)
    (step,) = few.steps
    assert step.plan.rule == "gemm"
    sizes = spec.graph.sizes
    touched = 2 * 32 * sizes["N"] * sizes["K"] * (1 / 2 + 1 / 32)
    assert touched <= step.plan.cost.traffic.ideal < 1.3 * touched
    dequantized = 2 * sizes["E"] * sizes["N"] * sizes["K"] * bf16.bytes
    assert few.time_us < dequantized / target(H).dram_gbs / 1e3 / 4
    for at, rows in ((H, 16384), (AMD, 32)):
        many: Any = fusegen.plan(spec.at(T=rows, E=8), at, tuned=False)
        assert len(many.steps) > 1


@pytest.mark.parametrize(("spec", "at"), [(batched, H), (of_four, AMD)], ids=["of a batch", "on AMD"])
def test_other_codes_are_dequantized_before(spec: Chain, at: str) -> None:
    program: Any = fusegen.compile(spec.at(T=5), at, on="emulator", validate=False, tuned=False)
    assert len(program.plan.steps) > 1
    assert validate(program, quick=True).ok
