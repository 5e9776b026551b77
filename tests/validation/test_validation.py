"""validate(): right kernels pass in every regime, on both vendors; what it looks at, and what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusegen import b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import compiler
from fusegen.errors import FusegenError, RequestError, ValidationError
from fusegen.language.graph import Graph
from fusegen.language.spec import Chain
from fusegen.language.types import DTYPES
from fusegen.pipeline import compile
from fusegen.planner import CONTIGUOUS, candidates
from fusegen.planner.model import Layout, RowPlan, Source
from fusegen.runtime import Kernel, finding
from fusegen.targets import H200, MI300X, Target
from fusegen.validation import Bounded, Case, Report, interesting_lengths, validate, validate_chain
from fusegen.validation.checks import Checks
from fusegen.validation.compare import compare, largest_errors
from fusegen.validation.inputs import make_operands, sizes_for, take
from fusegen.validation.memory import POISON, Arrangement, place, read_output, reserve, strides_for
from fusegen.validation.patterns import PATTERNS
from tests.row_plans import row_plan, row_plans
from tests.sizes import sizes_at
from tests.specs import ROWS as SPECS

try:
    compiler()
except FusegenError as error:
    pytest.skip(f"the emulator can't run here: {error}", allow_module_level=True)

M, N = dims("M N")
B, H, S = dims("B H S")
Fits = Callable[[RowPlan], bool]


def emulated(graph: Graph, target: Target = H200, fits: Fits = lambda plan: True, edit: str = "") -> Kernel:
    """The first candidate that fits, in the emulator; other layouts take their cheapest plan. `edit`: "old=>new"."""

    def variant(layout: Layout) -> tuple[Source, None]:
        plans = row_plans(graph, target, layout)
        source = render(next((p for p in plans if fits(p)), plans[0]))
        old, _, new = edit.partition("=>")
        return replace(source, text=source.text.replace(old, new) if edit else source.text), None

    return Kernel(*variant(CONTIGUOUS), finding.find(target, "emulator"), variant)


# ---------------------------------------------------------------- right kernels pass


@pytest.mark.pairwise("name", "cols", "target")
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("cols", [1, 7, 100, 1031])
def test_every_spec_passes(name: str, cols: int, target: Target, request: pytest.FixtureRequest) -> None:
    """In full at one row length, which layouts of every kind are for; with --all, at each."""
    found = SPECS[name]
    quick = cols != 1031 and not request.config.getoption("--all")
    validate(emulated(found.graph.at(**sizes_at(found.graph, cols)), target), quick=quick).raise_for_error()


@pytest.mark.pairwise("name", "dtype", "target")
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_every_spec_passes_in_every_dtype(name: str, dtype: str, target: Target) -> None:
    found = SPECS[name].with_dtype(DTYPES[dtype])
    report = validate(emulated(found.graph.at(**sizes_at(found.graph, 257)), target), quick=True)
    report.raise_for_error()


@pytest.mark.pairwise("name", "staging", "across")
@pytest.mark.parametrize("name", [n for n, c in SPECS.items() if c.graph.reductions])
@pytest.mark.parametrize("staging", ["registers", "shared", "stream"])
@pytest.mark.parametrize("across", [False, True], ids=["whole", "across"])
def test_every_regime_passes_and_uses_its_bound(name: str, staging: str, across: bool) -> None:
    """In f32, where storage rounding hides little: errors are a good part of what is allowed, and no more."""
    found = SPECS[name].with_dtype(f32)
    graph = found.graph.at(**sizes_at(found.graph, 1031 if across else 2056))

    def fits(plan: RowPlan) -> bool:
        return plan.staging == staging and plan.misaligned_rows == across

    if not any(map(fits, row_plans(graph, H200))):
        pytest.skip(f"the planner has no {staging} candidate for {name} across blocks: {across}")
    report = validate(emulated(graph, fits=fits), quick=True)
    report.raise_for_error()
    worst = [case.worst for case in report.cases if case.worst and case.worst.allowed > 0]
    used = max(abs(one.got - one.expected) / one.allowed for one in worst)
    assert used >= 0.015, f"the bound is loose\n{report}"


@pytest.mark.parametrize("cols", [4096, 1 << 20])
def test_a_quick_validation_is_quick(cols: int) -> None:
    """A row of a million included: launches shrink with the row, five of them to two rows."""
    report = validate(emulated(SPECS["rmsnorm"].graph.at(N=cols)), quick=True)
    report.raise_for_error()
    assert sum(case.elements for case in report.cases) <= max(2**19, 5 * 2 * cols)


# ---------------------------------------------------------------- operands of every kind


@chain(B=2, H=2, S=4, N=12)
def crowded(
    x: f32[B, H, S, N], w: f16[N], keep: b8[B, 1, 1, N], r: f32[B, H, S, 1], k: i32[B, 1, S, 1], a: f32, n: i32
) -> tuple[f32[B, H, S, N], i32[B, H, S, N], b8[B, H, S, N], f32[B, H, S, 1]]:
    """Vectors, masks, row scalars, run-time scalars, integers; four outputs."""
    y = F.where(keep, x * w * a, 0.0) / r
    count = k + n
    seen = F.col_index(x) < count
    z = F.where(seen, y, -1.0)
    above = z > 0.25
    return z, F.where(above, F.col_index(x), -1), above, F.max(z)


def test_operands_of_every_kind(target: Target) -> None:
    validate(emulated(crowded.graph, target)).raise_for_error()


@chain(N=100)
def line(x: f32[N]) -> f32[N]:
    """One axis, no rows."""
    return F.tanh(x) + 1.0


@chain(N=100)
def line_sum(x: f32[N]) -> f32[1]:
    """One axis, one sum."""
    return F.sum(x)


@pytest.mark.parametrize("one", [line, line_sum], ids=["map", "sum"])
def test_a_chain_of_one_axis(one: Chain, target: Target) -> None:
    report = validate(emulated(one.graph, target))
    report.raise_for_error()
    assert {"normal", "nan", "ties"} <= {case.name for case in report.cases}


def test_rows_of_every_pattern_are_what_they_say() -> None:
    plan = candidates(SPECS["add_rmsnorm"].graph.at(N=33), H200).plans[0]
    operands = make_operands(plan, sizes_for(plan, 2 * len(PATTERNS)), np.random.default_rng(0), PATTERNS)
    x, residual = (np.asarray(v, np.float64) for v in operands.values[:2])
    rows = {name: [i for i, label in enumerate(operands.labels) if label == name] for name in operands.labels}
    for at, other in zip((x, residual), (residual, x), strict=True):
        turn = rows["nan"][0 if at is x else 1]
        assert np.isnan(at[turn]).sum() == 1
        assert np.isfinite(other[turn]).all()  # one operand at a time
    assert (x[rows["-inf row"][0]] == -np.inf).all()
    assert len(set(x[rows["constant"][0]])) == 1
    assert (np.diff(x[rows["ascending"][0]]) >= 0).all()
    assert np.abs(x[rows["huge"][0]]).min() > 1e38
    assert (x[rows["zeros"][0]] == 0).all()
    assert np.signbit(x[rows["zeros"][0]]).any()


def test_operands_depend_on_the_seed_alone() -> None:
    plan = candidates(SPECS["masked_softmax"].graph.at(N=33), H200).plans[0]
    sizes = sizes_for(plan, 12, (2, 3))
    assert sizes == {"B": 2, "H": 3, "S": 2, "N": 33}
    one, same, other = (make_operands(plan, sizes, np.random.default_rng(s)) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one.values, same.values, strict=True))
    assert not np.array_equal(one.values[0], other.values[0])
    few = take(plan.graph, one, {"H": [2, 0]})
    assert few.values[0].shape == (2, 2, 2, 33)
    assert np.array_equal(few.values[0][:, 0], one.values[0][:, 2])
    assert few.values[1].shape == (2, 1, 1, 33)


def test_a_dim_that_stands_twice_counts_twice() -> None:
    @chain(M=4, N=8)
    def squares(x: f16[M, M, N]) -> f16[M, M, N]:
        return F.softmax(x)

    plan = candidates(squares.graph, H200).plans[0]
    found = [sizes_for(plan, rows)["M"] for rows in (0, 1, 2, 16, 17)]
    assert found == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(("count", "deep"), [(M, 12), (5, 0)])
def test_rows_that_count_themselves_are_as_many_as_there_may_be(count: Any, deep: int) -> None:
    """Five queries stay five: more of their batch would show nothing."""

    def spec(x: f32[B, count, 10]) -> f32[B, count, 10]:
        return F.softmax(F.causal(x))

    sizes = {"B": 2} if count == 5 else {"B": 2, "M": 5}
    made = compile(chain(**sizes)(spec), H200, on="emulator", validate=False)
    assert Checks(made, 0, None).deep() == deep


def test_products_promise_nothing_of_numbers_that_their_type_rounds_coarsely() -> None:
    """Half of the elements are subnormal, 6 % off; of those that are not, one is 0.4 % off."""

    @chain(M=1, N=4)
    def out(x: f32[M, N]) -> f16[M, N]:
        return x

    value = np.array([[3.3e-7, 6.5e-5, 1e-7, 7e-5]])
    got = np.array([[3.6e-7, 6.526e-5, 1.2e-7, 7e-5]], np.float16)
    law = Bounded(value, np.full(value.shape, 1e-6))
    largest, relative = largest_errors([compare(out.graph.outputs[0], got, law, value)])
    assert largest < 1e-6
    assert relative == pytest.approx(0.004, rel=0.1)


# ---------------------------------------------------------------- layouts, guards, poison


def test_arrangements() -> None:
    assert strides_for((2, 3, 5), Arrangement()) == (15, 5, 1)
    assert strides_for((2, 3, 5), Arrangement(padding=2)) == (21, 7, 1)
    assert strides_for((2, 3, 5), Arrangement(swapped=True)) == (5, 10, 1)
    assert strides_for((2, 3, 5), Arrangement(broadcast=True)) == (0, 5, 1)
    assert strides_for((5,), Arrangement(swapped=True, broadcast=True)) == (1,)


@pytest.mark.parametrize("how", [Arrangement(), Arrangement(padding=3), Arrangement(offset=1)], ids=str)
def test_every_stray_byte_and_every_missing_element_is_noticed(how: Arrangement) -> None:
    device = finding.find(H200, "emulator")
    poison = POISON[f16][0]
    out = reserve(device, (3, 5), f16, how, poison)
    good = np.arange(15, dtype=np.float16).reshape(3, 5)
    out.view.numpy()[...] = good
    found, problem = read_output(out, poison, "out")
    assert problem == ""
    assert np.array_equal(found, good)
    for at in (0, 511, out.memory.nbytes - 1):
        image = out.memory.read()
        image[at] ^= 0x10
        out.memory.write(image)
        assert "outside of the array" in read_output(out, poison, "out")[1]
        image[at] ^= 0x10
        out.memory.write(image)
    out.view.numpy().view(np.uint16)[1, 2] = poison
    assert "1 of 15 elements were not written, first [1, 2]" in read_output(out, poison, "out")[1]


def test_operands_arrive_as_they_are() -> None:
    device = finding.find(H200, "emulator")
    value = np.arange(30, dtype=np.float32).reshape(2, 3, 5)
    for how in (Arrangement(), Arrangement(padding=3), Arrangement(offset=1), Arrangement(swapped=True)):
        assert np.array_equal(place(device, value, f32, how, 0).view.numpy(), value)


# ---------------------------------------------------------------- what it finds


def broken(edit: str, name: str = "rmsnorm", cols: int = 100) -> Kernel:
    return emulated(SPECS[name].graph.at(N=cols), edit=edit)


def test_a_wrong_kernel_is_reported_with_its_place() -> None:
    report = validate(broken("rsqrtf(=>0.99f * rsqrtf("), quick=True)
    assert not report.ok
    case = report.cases[0]
    assert case.name == "normal"
    assert "elements are wrong: out[" in case.problem
    assert "expected" in str(report)
    assert "allowed" in str(report)
    with pytest.raises(ValidationError, match="rmsnorm disagrees with its reference"):
        report.raise_for_error()


def test_what_the_emulator_catches_is_a_failed_case_and_no_exception() -> None:
    report = validate(broken("col < 100=>col < 1000"), quick=True)
    assert not report.ok
    assert "out-of-bounds" in str(report)


def test_a_result_that_depends_on_other_rows_is_found() -> None:
    report = validate(broken("const float rrms = =>const float rrms = (rows > 1 ? 1.0f : 1.02f) * "), quick=True)
    assert [case.name for case in report.cases if not case.ok] == ["apart"]


def test_a_check_that_proves_nothing_fails() -> None:
    @chain(M=4, N=8)
    def nothing(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N]]:
        """Deviations from the mean add up to rounding errors, and nothing else."""
        deviation = x - F.mean(x)
        return deviation, deviation / F.sum(deviation)

    report = validate(emulated(nothing.graph), quick=True)
    assert [case.name for case in report.cases if not case.ok] == ["judged"]
    assert {"normal", "gentle", "steady"} <= {case.name for case in report.cases}
    refusal = "out1 can't be validated: no input leaves more than 0% of it with an error bound"
    for raises in (report.raise_for_error, lambda: compile(nothing, H200, on="emulator")):
        with pytest.raises(RequestError, match=refusal) as caught:
            raises()
        assert "of what div at " in str(caught.value)
        assert "validate=False" in str(caught.value)
    broken = emulated(nothing.graph, edit="sum_of_x / 8.0f=>sum_of_x / 9.0f")
    assert not validate(broken, quick=True).unjudged  # what is wrong is wrong


def test_a_chain_that_blows_unit_scale_up_is_checked_at_a_gentle_one() -> None:
    @chain(M=4, N=8)
    def steep(x: f32[M, N]) -> f32[M, N]:
        """On its way beyond f32 for some x."""
        return F.exp(F.square(x) * 24.0) * 1e-30

    report = validate(emulated(steep.graph), quick=True)
    report.raise_for_error()
    assert report.cases[0].bounded < 0.99
    assert report.cases[1].name == "gentle"
    assert report.cases[1].bounded == 1


def test_what_divides_by_almost_nothing_is_checked_on_steady_numbers() -> None:
    @chain(M=9, N=2047)
    def quotients(x: bf16[M, N], y: bf16[M, N]) -> bf16[M, N]:
        return F.softmax(F.mean(x) / y * 2047.0)

    report = validate(emulated(quotients.graph), quick=True)
    report.raise_for_error()
    assert [(case.name, case.bounded) for case in report.cases if case.name == "steady"] == [("steady", 1.0)]
    found = validate(emulated(quotients.graph, edit="* 2047.0f=>* 2040.0f"), quick=True)
    assert "steady" in [case.name for case in found.cases if not case.ok]


def test_quotients_beyond_f32_are_judged() -> None:
    @chain(M=4, N=100)
    def inverse(x: f32[M, N]) -> f32[M, N]:
        return 1e38 / x

    report = validate(emulated(inverse.graph), quick=True)
    report.raise_for_error()
    assert report.cases[0].bounded == 1
    clamped = emulated(inverse.graph, edit="= 1e+38f / x=>= fminf(1e+38f / x, 3.4e38f)")
    assert "expected" in validate(clamped, quick=True).cases[0].problem


def test_rows_that_cancel_promise_no_relative_error() -> None:
    @chain(M=4, N=8193)
    def nearly_nothing(x: f32[M, N], s: f32) -> f32[M, N]:
        """The variance of what is the same all over."""
        return F.var(F.where(x > 1e30, x, s)) / (abs(x) + 0.5)

    report = validate(emulated(nearly_nothing.graph), quick=True, cases=["normal"])
    report.raise_for_error()
    assert all(np.isfinite(case.relative_l2) for case in report.cases)


def test_a_full_validation_shows_what_depends_on_fused_multiply_adds() -> None:
    graph = SPECS["rmsnorm"].with_dtype(f32).graph.at(N=100)
    clipped = "const float z = fminf(fmaxf(x_row[col], -1.0f), 1.0f)"
    rest = "1e4f * ((z + 2.0f * z) - z * 3.0f)"  # 0, unless the product is fused with the difference
    edit = f"const float x = =>{clipped}; const float x = {rest} + "
    kernel = emulated(graph, edit=edit)
    assert validate(kernel, quick=True).ok
    assert {case.name for case in validate(kernel).cases if not case.ok} == {"contracted"}
    assert validate(emulated(graph), cases=["contracted"]).cases[0].ok


@pytest.mark.parametrize("cols", [191, 257])
def test_the_variance_of_a_constant_row_that_is_scaled_on_its_way(cols: int, target: Target) -> None:
    @chain(M=4, N=191)
    def scaled(x: f32[M, N]) -> f32[M, 1]:
        return F.var(x * 3.0)

    validate(emulated(scaled.graph.at(N=cols), target), quick=True, cases=["constant"]).raise_for_error()


def test_the_reference_text_is_what_counts() -> None:
    kernel = emulated(SPECS["rmsnorm"].graph.at(N=8))
    wrong = replace(kernel.source, reference=kernel.source.reference.replace("1e-06", "1e-01"))
    report = validate(Kernel(wrong, None, kernel.device, kernel.make_variant), quick=True)
    assert "the reference text and the ops' table differ" in str(report)


def test_cases_can_be_chosen() -> None:
    kernel = emulated(SPECS["rmsnorm"].graph.at(N=8))
    assert {c.name for c in validate(kernel, quick=True, cases=["nan", "ties"]).cases} == {"nan", "ties"}
    assert {c.name for c in validate(kernel, cases=["apart"]).cases} == {"normal", "apart"}
    assert {c.name for c in validate(kernel, rows=[3, 5], cases=["rows"]).cases} == {"rows: 3", "rows: 5"}


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"seed": "0"}, {"rows": (-1,)}, {"rows": (3, 1.5)}], ids=str)
def test_what_is_no_seed_and_no_number_of_rows(wrong: dict[str, Any]) -> None:
    kernel = emulated(SPECS["rmsnorm"].graph.at(N=8))
    with pytest.raises(RequestError, match="is no whole number of at least 0"):
        validate(kernel, cases=["rows"], **wrong)


def test_f32_row_chains_keep_their_promised_l2() -> None:
    kernel = emulated(SPECS["rmsnorm"].with_dtype(f32).graph.at(N=100))
    report = validate(kernel, quick=True, cases=["normal"])
    assert [case.name for case in report.cases][:2] == ["normal", "rel L2 <= 1e-05"]
    assert report.cases[1].ok
    rough = emulated(kernel.plan.graph, edit="rsqrtf(=>1.0001f * rsqrtf(")
    assert not validate(rough, quick=True, cases=["normal"]).cases[1].ok


def test_f32_row_chains_promise_no_l2_of_what_steps() -> None:
    """One whole number that is another one's neighbour is within the bounds, and more than 1e-5 of a row."""

    @chain(M=3, N=577)
    def quantized(x: f32[M, N]) -> tuple[i32[M, N], f32[M, 1]]:
        scale = F.maximum(F.max(abs(x)), 1e-6) / 127.0
        return F.cast(x / scale, i32), scale

    kernel = emulated(quantized.graph)
    for seed in range(40):
        validate(kernel, seed=seed, quick=True, cases=["normal"]).raise_for_error()


def test_two_seeds_take_different_inputs() -> None:
    kernel = emulated(SPECS["rmsnorm"].graph.at(N=8))
    one, again, other = (validate(kernel, seed=s, quick=True, cases=["normal"]).cases[0] for s in (1, 1, 2))
    assert one == again
    assert one != other


# ---------------------------------------------------------------- reports


def test_reports_survive_json() -> None:
    report = validate(broken("rsqrtf(=>0.0f * rsqrtf("), quick=True)
    text = json.dumps(report.to_json(), allow_nan=False)
    assert Report.from_json(json.loads(text)).to_json() == report.to_json()  # NaN equals no NaN
    passed = validate(emulated(SPECS["rmsnorm"].graph.at(N=8)), quick=True)
    assert str(Report.from_json(json.loads(json.dumps(passed.to_json())))) == str(passed)


def test_a_report_without_cases_is_no_success() -> None:
    assert not Report("k", "emulator", 0, ()).ok
    assert Report("k", "emulator", 0, (Case("normal", "why"),)).ok


def test_it_says_where_it_ran() -> None:
    assert validate(emulated(SPECS["copy"].graph, MI300X), quick=True).on == "emulator (checking), warp 64"


# ---------------------------------------------------------------- lengths


def test_interesting_lengths_lie_around_the_edges() -> None:
    plan = row_plan(SPECS["rmsnorm"].graph.at(N=1000), H200)
    lengths = interesting_lengths(plan)
    vector, cols = plan.tile.vector, plan.tile.cols
    assert {1, vector - 1, vector, vector + 1, 31, 32, 33, cols - 1, cols, cols + 1, 1000} <= set(lengths)
    assert list(lengths) == sorted(set(lengths))


@pytest.mark.by_values("name", "target")  # each spec meets each target at other lengths above
@pytest.mark.parametrize("name", ["masked_softmax", "bias_gelu_residual_ln", "swiglu_elementwise"])
def test_a_chain_passes_around_every_edge_of_its_plan(name: str, target: Target) -> None:
    found = SPECS[name]
    seen: list[tuple[int, int]] = []
    reports = validate_chain(
        found.at(**sizes_at(found.graph, 300)),
        lambda c: emulated(c.graph, target),
        progress=lambda done, of, report: seen.append((done, of)),
    )
    assert all(report.ok for report in reports.values()), "\n".join(str(r) for r in reports.values() if not r.ok)
    assert seen == [(i, len(reports)) for i in range(1, len(reports) + 1)]


def test_launches_do_not_depend_on_which_cases_are_wanted() -> None:
    kernel = emulated(SPECS["rmsnorm"].graph.at(N=8))
    every = {c.name: c for c in validate(kernel, quick=True).cases}
    some = {c.name: c for c in validate(kernel, quick=True, cases=["again", "normal"]).cases}
    assert some["normal"] == every["normal"]
