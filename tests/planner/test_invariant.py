"""batch_invariant: a row's bits are the same at whatever number of rows its chain was compiled."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f16, f32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import ArgumentError, NoPlan, SpecError, ValidationError
from fusegen.planner import candidates, invariant, orders
from fusegen.planner.invariant import ROWS, with_rows
from fusegen.planner.model import Plan
from fusegen.planner.orders import order_of
from fusegen.runtime import Kernel
from fusegen.runtime.cache import compiled
from fusegen.runtime.finding import find, present, target_of
from fusegen.targets import A100, H200, MI300X, Target
from fusegen.validation.few_parts import no_variant
from fusegen.validation.invariance import NAME as BATCH
from fusegen.validation.report import Case, Report
from tests import gemms
from tests.specs import SHIPPED

pytestmark = pytest.mark.usefixtures("emulated_only")
B, C, E, G, H, K, M, N, T, W = dims("B C E G H K M N T W")


@chain(M=64, N=4096)
def normed(x: f16[M, N], residual: f16[M, N], gamma: f16[N]) -> tuple[f16[M, N], f32[M, 1]]:
    h = x + residual
    return F.rmsnorm(h, gamma), F.logsumexp(h)


@chain(M=64, N=48, K=640)
def product(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]) -> bf16[M, N]:
    return F.gelu(x @ w.T + bias)


@chain(B=2, G=2, M=8, T=200, K=32)
def attention(q: bf16[B, G, M, K], k: bf16[B, G, T, K], v: bf16[B, G, T, K]) -> bf16[B, G, M, K]:
    return F.softmax(q @ k.mT * K**-0.5) @ v


@chain(M=64, N=4096)
def chosen(x: f32[M, N]) -> tuple[f32[M, 4], f32[M, N]]:
    values, _ = F.topk(x, 4)
    return values, F.softmax(x)


@chain(B=4, C=8, H=16, W=16)
def of_several_axes(x: bf16[B, C, H, W], gain: bf16[C, 1, 1]) -> bf16[B, C, H, W]:
    d = x - F.mean(x, over=(C, H, W))
    return d * F.rsqrt(F.mean(d * d, over=(C, H, W)) + 1e-5) * gain


@chain(B=4, C=300, W=40)
def of_columns(x: bf16[B, C, W]) -> tuple[bf16[B, C, W], f32[B, 1, W]]:
    return F.softmax(x, axis=1), F.sum(x * x, over=C)


def numbers(made: Chain, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    sizes = made.graph.sizes
    return [
        rng.standard_normal([fusegen.language.types.size_of(s, sizes) for s in t.shape]).astype(t.dtype.numpy)
        for t in made.graph.inputs
    ]


def rows_of(spec: Chain, rows: int, target: Target, given: list[Any]) -> list[Any]:
    """The first of so many rows, of a chain compiled for that many."""
    free = "B" if "B" in spec.graph.sizes else "M"
    made = spec.at(**{free: rows})
    operands = [x[:rows] if free in map(str, t.shape) else x for t, x in zip(spec.graph.inputs, given, strict=True)]
    kernel = fusegen.compile(made, target, on="emulator", validate=False, tuned=False, batch_invariant=True)
    out = kernel(*operands)
    return [np.asarray(y[:1]).view(np.uint8) for y in (out if isinstance(out, tuple) else (out,))]


@pytest.mark.parametrize("target", [H200, A100, MI300X], ids=lambda t: t.model)
@pytest.mark.parametrize("spec", [normed, product, attention, of_several_axes, of_columns], ids=lambda c: c.name)
def test_a_row_has_the_same_bits_among_any_number(spec: Chain, target: Target) -> None:
    free, most = ("B", 24) if "B" in spec.graph.sizes else ("M", 300)
    given = numbers(spec.at(**{free: most}))
    one, *others = [rows_of(spec, rows, target, given) for rows in (1, 5, most)]
    for other in others:
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def plans_of(spec: Chain, target: Target, **asked: Any) -> list[Any]:
    return [fusegen.plan(with_rows(spec.graph, rows), target, tuned=False, **asked) for rows in ROWS]


@pytest.mark.parametrize("spec", [normed, gemms.bias_gelu.at(N=4096, K=4096)], ids=lambda c: c.name)
def test_without_it_other_numbers_of_rows_have_other_orders(spec: Chain) -> None:
    """Else it would do nothing; with it they have one, and are no slower than ten times the best."""
    usual, one_order = plans_of(spec, H200), plans_of(spec, H200, batch_invariant=True)
    assert len({order_of(plan) for plan in usual}) > 1
    assert len({order_of(plan) for plan in one_order}) == 1
    assert all(plan.cost.time_us < 10 * other.cost.time_us for plan, other in zip(one_order, usual, strict=True))


def of_one_order(spec: Chain, target: Target) -> list[list[Plan]]:
    """The candidates of each order that has several."""
    found: dict[object, list[Plan]] = {}
    for plan in candidates(spec.graph, target).plans:
        found.setdefault(order_of(plan), []).append(plan)
    several = [plans for plans in found.values() if len(plans) > 1]
    assert several
    return several


def kernel_of(plan: Plan, on: str, target: Target) -> Kernel:
    source = render(plan)
    binary = compiled(source, origin=plan.name) if on == "gpu" else None
    return Kernel(source, binary, find(target, on), no_variant)


def bits_of(kernel: Kernel, given: list[Any]) -> list[Any]:
    out = kernel(*given)
    return [np.asarray(y) for y in (out if isinstance(out, tuple) else (out,))]


@pytest.mark.parametrize("spec", [normed.at(M=3), product.at(M=40)], ids=lambda c: c.name)
def test_plans_of_one_order_have_the_same_bits(spec: Chain) -> None:
    """Of each order the first plan and the last one."""
    given = numbers(spec)
    for first, *_, last in of_one_order(spec, H200):
        one, other = (bits_of(kernel_of(plan, "emulator", H200), given) for plan in (first, last))
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(
                a.view(np.uint8), b.view(np.uint8), f"{first.configuration}, {last.configuration}"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [normed.at(M=33), product.at(M=300, N=1024, K=4096)], ids=lambda c: c.name)
def test_plans_of_one_order_have_the_same_bits_on_a_gpu(spec: Chain) -> None:
    """All of them."""
    torch = pytest.importorskip("torch")
    target = next((found for gpu in present().gpus if (found := target_of(gpu)) is not None), None)
    if target is None:
        pytest.skip("no GPU that a target fits: `fusegen doctor` says why")
    torch.manual_seed(0)
    types = {bf16: torch.bfloat16, f16: torch.float16, f32: torch.float32}
    given = [
        torch.randn([fusegen.language.types.size_of(s, spec.graph.sizes) for s in t.shape]).to(types[t.dtype]).cuda()
        for t in spec.graph.inputs
    ]

    def bits(plan: Plan) -> list[Any]:
        out = kernel_of(plan, "gpu", target)(*given)
        return [y.contiguous().view(torch.uint8) for y in (out if isinstance(out, tuple) else (out,))]

    for first, *others in of_one_order(spec, target):
        wanted = bits(first)
        for plan in others:
            for a, b in zip(bits(plan), wanted, strict=True):
                assert torch.equal(a, b), f"{plan.configuration} has other bits than {first.configuration}"


def test_sizes_of_rows_have_no_part_in_the_choice() -> None:
    found = {order_of(fusegen.plan(attention.at(B=b, G=g, M=m), H200, tuned=False, batch_invariant=True))
              for b, g, m in ((1, 1, 1), (1, 8, 128), (64, 32, 4))}  # fmt: skip
    assert len(found) == 1


def test_other_chains_are_refused() -> None:
    @chain(M=64, N=128)
    def columns(x: f32[M, N]) -> f32[1, N]:
        return F.sum(x, over=M)

    with pytest.raises(NoPlan, match="columns sums over rows, so that its results depend on how many there are"):
        fusegen.compile(columns, H200, on="emulator", batch_invariant=True)


def test_what_is_summed_over_is_no_number_of_rows() -> None:
    assert with_rows(of_several_axes.graph, 9).sizes == dict(B=9, C=8, H=16, W=16)
    assert with_rows(of_columns.graph, 9).sizes == dict(B=9, C=300, W=40)
    report = fusegen.compile(of_several_axes, H200, on="emulator", batch_invariant=True).report
    assert report is not None
    assert report.ok


def test_axes_that_are_apart_are_refused() -> None:
    kernel = fusegen.compile(of_several_axes, H200, on="emulator", validate=False, batch_invariant=True)
    x, gain = numbers(of_several_axes.at(W=32))
    with pytest.raises(ArgumentError, match="x has a stride of 2 elements along its last axis"):
        kernel(x[..., ::2], gain)


def test_arrays_that_lie_otherwise_are_summed_alike_or_refused() -> None:
    made = normed.at(M=6)
    kernel = fusegen.compile(made, H200, on="emulator", validate=False, tuned=False, batch_invariant=True)
    x, residual, gamma = numbers(made)
    wide = np.zeros((6, 4097), np.float16)
    wide[:, 1:] = x
    for one, other in zip(kernel(x, residual, gamma), kernel(wide[:, 1:], residual, gamma), strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))


@chain(M=40, N=96, K=512, batch_invariant=True)
def twice(x: bf16[M, K], w: bf16[N, K], v: bf16[K, N]) -> bf16[M, K]:
    return F.gelu(x @ w.T) @ v.T


@chain(T=6, K=32, N=32, E=4, batch_invariant=True)
def experts(x: bf16[T, K], router: bf16[E, K], w: bf16[E, N, K]) -> bf16[T, N]:
    best, chosen = F.topk(x @ router.T, 2)
    order, ends, places = F.sort_by_group(chosen, E)
    y = F.cast(F.grouped_matmul(F.gather(x, order // 2), w.mT, ends), bf16)
    return F.gather_sum(y, places, F.softmax(best))


def test_the_kernels_of_a_program_are_the_same_for_all_numbers_of_rows() -> None:
    programs: list[Any] = [fusegen.plan(twice.at(M=rows), H200, tuned=False) for rows in (1, 40, 9000)]
    found = [[(step.name, order_of(step.plan)) for step in program.steps] for program in programs]
    assert found[0] == found[1] == found[2]
    assert [p.graph.rows for p in programs] == [1, 40, 9000]
    usual: list[Any] = [fusegen.plan(replace(p.graph, batch_invariant=False), H200, tuned=False) for p in programs]
    assert len({tuple(step.plan.configuration for step in p.steps) for p in usual}) > 1


def cases_of(report: Report) -> list[Case]:
    return [case for case in report.cases if case.name.startswith(BATCH)]


def test_a_program_is_validated_at_other_numbers_of_rows() -> None:
    made = fusegen.compile(twice, H200, on="emulator", tuned=False)
    assert [(case.name, case.ok, case.bitwise) for case in cases_of(made.report)] == [("batch: 65536", True, True)]
    report = fusegen.validate(made, cases=("normal", "batch", "layout"))
    assert report.ok, report
    assert {"batch: 128", "batch: 8192", "batch: padded rows"} < {case.name for case in cases_of(report)}
    (odd,) = (case for case in report.cases if case.name == "layout: odd stride")
    assert "refused, since no kernel for it sums in the order that serves every number of rows" in odd.reason


def test_parts_of_keys_lie_as_the_sizes_at_hand_have_them() -> None:
    """Between its two kernels, whose tensors lie next to one another only where there is one row."""
    spec = SHIPPED["decode_attention"].at(B=3, G=2, R=2, D=64, T=1024)
    given = numbers(spec)
    many, one = made = [
        fusegen.compile(spec.at(B=rows), MI300X, on="emulator", validate=False, tuned=False, batch_invariant=True)
        for rows in (3, 1)
    ]
    assert all(isinstance(program, fusegen.Program) and len(program.plan.steps) == 2 for program in made)
    among = np.asarray(many(*given))[:1]
    np.testing.assert_array_equal(among.view(np.uint8), np.asarray(one(*(x[:1] for x in given))).view(np.uint8))


def test_tokens_alone_have_the_bits_that_they_have_among_others() -> None:
    """Their number is a constant of the kernels that sort them by experts, so that fewer have kernels of their own."""
    made = fusegen.compile(experts, MI300X, on="emulator", tuned=False)
    (case,) = cases_of(made.report)
    assert (case.name, case.ok, case.elements) == ("batch: few", True, 3 * 32)


def test_an_order_that_follows_the_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all plans summed alike."""
    for module in (orders, invariant):
        monkeypatch.setattr(module, "order_of", lambda plan: plan.rule == "gemm")

    @chain(M=8, N=96, K=512, batch_invariant=True)
    def broken(x: bf16[M, K], w: bf16[N, K], v: bf16[K, N]) -> bf16[M, K]:
        return F.gelu(x @ w.T) @ v.T

    with pytest.raises(ValidationError, match=r"batch: 65536(?s:.)*differ in their bits"):
        fusegen.compile(broken, MI300X, on="emulator", tuned=False)


def test_the_spec_says_it_as_the_call_does() -> None:
    @chain(M=64, N=4096, batch_invariant=True)
    def said(x: f16[M, N], residual: f16[M, N], gamma: f16[N]) -> tuple[f16[M, N], f32[M, 1]]:
        h = x + residual
        return F.rmsnorm(h, gamma), F.logsumexp(h)

    wanted = fusegen.plan(normed, H200, tuned=False, batch_invariant=True).configuration
    for made in (said, said.at(M=64), pickle.loads(pickle.dumps(said))):
        assert fusegen.plan(made, H200, tuned=False).configuration == wanted
    with pytest.raises(SpecError, match="batch_invariant=3: it is True or False, and no dim may be called so"):
        chain(M=64, batch_invariant=3)
