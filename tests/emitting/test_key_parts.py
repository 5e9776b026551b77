"""Attention whose keys are dealt to parts: right on every target, chosen where heads are few, and faults are caught."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Chain, Program, b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.pipeline import compile_program
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.planner.model import Plan
from fusegen.planner.programs.key_parts import numbers_of_parts
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.search import cheapest
from fusegen.planner.programs.smaller import smaller
from fusegen.runtime import Kernel
from fusegen.targets import target
from fusegen.validation import validate
from fusegen.validation.few_parts import no_variant
from tests.specs import SHIPPED

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("emulated_only")

B, G, R, S, T, D = dims("B G R S T D")
SIZES = {"B": 2, "G": 2, "R": 3, "T": 300, "D": 32}
TILES = {"cuda:h200": 128, "cuda:sm_80": 64, "hip:mi300x": 32}  # keys of a tile: by wgmma, mma.sync and MFMA
DECODE = SHIPPED["decode_attention"]


@chain(**SIZES)
def between_ends(
    q: f16[B, G, R, D], k: f16[B, G, T, D], v: f16[B, G, T, D], start: i32[B, 1, 1, 1], end: i32[B, 1, R, 1],
) -> tuple[f32[B, G, R, D], f32[B, G, R, 1]]:  # fmt: skip
    s = q @ k.mT * D**-0.5
    col = F.col_index(s)
    s = F.where((col >= start) & (col < end), s, -inf)
    return F.softmax(s) @ v, F.logsumexp(s)


@chain(**SIZES)
def with_sinks(
    q: bf16[B, G, R, D], k: bf16[B, G, T, D], v: bf16[B, G, T, D], sink: f32[1, G, R, 1],
) -> bf16[B, G, R, D]:  # fmt: skip
    s = q @ k.mT * D**-0.5
    top = F.maximum(F.max(s), sink)
    e = F.exp(s - top)
    return (e / (F.sum(e) + F.exp(sink - top))) @ v


@chain(**SIZES)
def with_all_around(
    q: bf16[B, G, R, D], k: bf16[B, G, T, D], v: bf16[B, G, T, D], bias: bf16[1, G, R, T], keep: b8[B, 1, 1, T],
    weight: bf16[B, 1, 1, T], gate: bf16[B, G, R, D],
) -> bf16[B, G, R, D]:  # fmt: skip
    s = 20.0 * F.tanh(q @ k.mT * (D**-0.5 / 20.0)) + bias
    return (F.softmax(F.where(keep, s, -inf)) * weight) @ v * F.sigmoid(gate)


@chain(B=2, G=2, S=5, T=300, D=32)
def in_a_window(q: bf16[B, G, S, D], k: bf16[B, G, T, D], v: bf16[B, G, T, D]) -> bf16[B, G, S, D]:
    s = q @ k.mT * D**-0.5
    row, col = F.row_index(s) + 200, F.col_index(s)
    return F.softmax(F.where((col <= row) & (col > row - 100), s, -inf)) @ v


def dealt(spec: Chain, on: str, parts: int) -> Program:
    """The chain's program with so many parts."""
    plan = cheapest(spec.graph, target(on), dealt=(TILES[on], parts))
    assert attention_of(plan).parts == parts
    return compile_program(plan, on="emulator", validate=False, tuned=False, as_planned=True)


def attention_of(plan: ProgramPlan) -> AttentionPlan:
    (found,) = (step.plan for step in plan.steps if isinstance(step.plan, AttentionPlan))
    return found


@pytest.mark.parametrize(
    ("spec", "on", "parts", "kernels"),
    [
        (between_ends, "cuda:h200", 3, 3),  # two bring parts together: of elements, and of what is one value a row
        (between_ends, "hip:mi300x", 4, 3),
        (with_sinks, "cuda:sm_80", 2, 2),
        (with_all_around, "cuda:h200", 2, 2),
        (in_a_window, "cuda:sm_80", 3, 2),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_parts_are_right(spec: Chain, on: str, parts: int, kernels: int) -> None:
    program = dealt(spec, on, parts)
    report = validate(program, quick=True)
    assert report.ok, str(report)
    assert len(program.plan.steps) == kernels


@pytest.mark.parametrize("on", TILES)
def test_lengths_that_leave_parts_or_rows_without_keys(on: str) -> None:
    """One length for each sequence, by numpy of the test's own: no keys, one, a tile and one, and all."""
    lengths = np.array([0, 1, TILES[on] + 1, 300], np.int32)
    program = dealt(DECODE.at(B=4, G=1, R=2, T=300, D=32), on, 3)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((4, 1, n, 32)).astype(bf16.numpy) for n in (2, 300, 300))
    out = np.asarray(program(q, k, v, lengths.reshape(4, 1, 1, 1))).astype(np.float64)
    assert (out[0] == 0).all()
    wide = [x.astype(np.float64) for x in (q, k, v)]
    for own, length, (one, keys, values) in zip(out[1:], lengths[1:], list(zip(*wide, strict=True))[1:], strict=True):
        e = np.exp(one @ keys[:, :length].swapaxes(-1, -2) * 32**-0.5)
        np.testing.assert_allclose(own, e / e.sum(-1, keepdims=True) @ values[:, :length], atol=2e-2)


def test_tiles_of_wgmma_are_dealt_to_what_copies_can_not_move() -> None:
    """128 keys of 128 numbers at a time, which a thread of mma.sync has no registers for on their way."""
    program = dealt(DECODE.at(B=1, G=1, R=2, T=300, D=128), "cuda:h200", 2)
    report = validate(program, cases=("normal", "layout"))
    assert report.ok, str(report)
    assert any(case.name == "layout: odd stride" for case in report.cases)


# ---------------------------------------------------------------- faults

FAULTS = {  # which kernel, and what is wrong in its text
    "a part's sums are not rescaled": (1, r"const float exp_ = exponential\(\w+\);", "const float exp_ = 1.0f;"),
    "parts are weighed by the inverse": (1, r"exponential\((\w+)\);", r"exponential(-\1);"),
    "a part's sum of exponentials is left as it is": (1, r"sum_of_exps_parts_part \* exp_;", "sum_of_exps_parts_part;"),
    "each part begins a tile late": (0, r"first_key = static_cast<int>\((\w+)\)", r"first_key = (1 + (int)\1)"),
    "a part takes the next part's tiles too": (0, "next_tile = parts", "next_tile = (parts - 1)"),
    "a part skips its later tiles": (0, "next_tile = parts", "next_tile = 3 * parts"),
    "a part leaves what it has where another does": (0, r"\b(\w+_at) \* out_parts_stride_axis0", "0"),
    "a part's largest logit is that of a lane": (0, r"larger\(peaks\[r\], partner\(peaks\[r\], step\)\)", "peaks[r]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def right() -> Program:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusegen.pipeline.compiled", unmade)
        return dealt(DECODE.at(B=1, G=2, R=2, T=300, D=32), "cuda:sm_80", 2)


def unmade(*_: Any, **__: Any) -> Any:
    raise fusegen.errors.MissingError("no machine code: what runs is the text")


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(right: Program, fault: str) -> None:
    place, pattern, instead = FAULTS[fault]
    kernel = right.kernels[place]
    assert isinstance(kernel, Kernel)
    text, count = re.subn(pattern, instead, kernel.source.text)
    assert count, f"{pattern} is nowhere in the kernel"
    wrong = Kernel(replace(kernel.source, text=text), None, kernel.device, no_variant)
    kernels = [wrong if own is kernel else own for own in right.kernels]
    assert not validate(Program(right.plan, kernels, right.device), quick=True).ok


# ---------------------------------------------------------------- when, and in how many


def planned(on: str, **sizes: int) -> Plan | ProgramPlan:
    return fusegen.plan(DECODE.at(**sizes), on, tuned=False)


def test_few_heads_are_dealt_and_many_are_not() -> None:
    few = planned("cuda:h200", B=1, T=8192)
    assert isinstance(few, ProgramPlan)
    assert [step.name for step in few.steps] == ["decode_attention_out_parts", "decode_attention_out"]
    assert isinstance(planned("cuda:h200", B=64, T=2048), AttentionPlan), "512 heads fill a GPU by themselves"
    assert isinstance(planned("cuda:h200", B=1, T=256), AttentionPlan), "keys of two tiles are not worth a launch"
    assert isinstance(planned("cuda:h200", B=1, R=256, T=8192), AttentionPlan), "nor are many queries of a head"


@pytest.mark.parametrize("on", TILES)
@pytest.mark.parametrize("keys", [129, 1000, 8191, 2**20])
def test_parts_have_as_many_tiles_as_another_or_one_less(on: str, keys: int) -> None:
    found = list(numbers_of_parts(DECODE.at(B=1, T=keys).graph, keys, target(on)))
    assert found
    for tile, parts in found:
        tiles = [len(range(part, -(-keys // tile), parts)) for part in range(parts)]
        assert min(tiles) >= 1
        assert max(tiles) - min(tiles) <= 1


def test_many_keys_are_validated_by_fewer_in_as_many_parts() -> None:
    large = planned("cuda:h200", B=1, T=2**20 + 5)
    assert isinstance(large, ProgramPlan)
    small = smaller(large)
    assert small is not None
    assert small.graph.sizes["T"] % 128 == 5
    assert small.graph.sizes["T"] < 2**14
    assert attention_of(small).parts == attention_of(large).parts
    assert attention_of(small).configuration == attention_of(large).configuration
