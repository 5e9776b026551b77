"""One row of each of several heads that share keys: heads become rows, with right results on every kind of target."""

from __future__ import annotations

from math import inf

import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.language.types import size_of
from fusegen.pipeline import compile_program
from fusegen.planner import candidates
from fusegen.planner.programs import program_instead
from fusegen.planner.programs.heads_as_rows import heads_as_rows
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.search import cheapest
from fusegen.runtime import Program
from fusegen.targets import target
from fusegen.validation import validate
from fusegen.validation.even_sizes import comes_out_even, even_sizes

B, G, R, S, T, D, H, E, P, N, L = dims("B G R S T D H E P N L")
TARGETS = ("cuda:h200", "cuda:sm_80", "hip:mi300x")


@chain(B=2, G=2, R=4, T=700, D=32)
def cached(
    q: bf16[B, G, R, 1, D], k: bf16[B, G, 1, T, D], v: bf16[B, G, 1, T, D], length: i32[B, 1, 1, 1, 1],
) -> bf16[B, G, R, 1, D]:  # fmt: skip
    s = q @ k.mT * D**-0.5
    return F.softmax(F.where(F.col_index(s) < length, s, -inf)) @ v


@chain(B=2, H=4, T=700, D=32)
def causal(
    q: bf16[B, H, 1, D], k: bf16[B, 1, T, D], v: bf16[B, 1, T, D], slope: f32[H, 1, 1], gate: f32[B, H, 1, 1],
) -> tuple[bf16[B, H, 1, D], f32[B, H, 1, 1]]:  # fmt: skip
    """The only row is the first one, whatever head it is of: it sees one key."""
    s = q @ k.mT * D**-0.5
    s = F.causal(s + slope * F.col_index(s))
    return F.softmax(s) @ v * gate, F.logsumexp(s)


@chain(B=2, H=8, T=300, D=80, E=64)
def latent(q: bf16[B, H, 1, D], kv: bf16[B, 1, T, D]) -> bf16[B, H, 1, E]:
    return F.softmax(q @ kv.mT * 0.1) @ kv[..., :E]


@chain(B=2, H=8, G=2, T=300, D=64)
def packed(q: bf16[B, 1, H * D], k: bf16[B, T, G, D], v: bf16[B, T, G, D]) -> bf16[B, 1, H * D]:
    queries = F.rearrange(q, "b s (g r d) -> b g r s d", g=G, d=D)
    keys, values = (F.rearrange(x, "b t g d -> b g 1 t d") for x in (k, v))
    return F.rearrange(F.softmax(queries @ keys.mT * 0.1) @ values, "b g r s d -> b s (g r d)")


@chain(H=8, T=700, D=32)
def alone(q: f16[H, 1, D], k: f16[T, D], v: f16[T, D]) -> f16[H, 1, D]:
    return F.softmax(q @ k.mT * 0.2) @ v


@chain(B=3, H=16, D=64, E=160)
def one_product(x: bf16[B, H, 1, D], w: bf16[B, 1, D, E], bias: f32[E]) -> bf16[B, H, 1, E]:
    return F.gelu(x @ w + bias)


@chain(B=2, H=16, T=520, D=64)
def weights(q: bf16[B, H, 1, D], k: bf16[B, 1, T, D]) -> f32[B, H, 1, T]:
    return F.softmax(q @ k.mT * 0.1)


@chain(B=2, G=2, R=4, P=9, N=4, L=32, D=32)
def paged(
    q: bf16[B, G, R, 1, D], keys: bf16[P, L, G, D], values: bf16[P, L, G, D], table: i32[B, N],
) -> bf16[B, G, R, 1, D]:  # fmt: skip
    k, v = (F.rearrange(F.gather(x, table), "b n l g d -> b g 1 (n l) d") for x in (keys, values))
    return F.softmax(q @ k.mT * 0.1) @ v


CHAINS = {c.name: c for c in (cached, causal, latent, packed, alone, paged, one_product, weights)}


@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("on", TARGETS)
@pytest.mark.parametrize("name", CHAINS)
def test_heads_are_rows_and_results_are_right(name: str, on: str) -> None:
    spec = CHAINS[name]
    plan = cheapest(spec.graph, target(on))
    assert plan.graph is spec.graph  # what users call and references are made of
    graphs = [step.graph for step in plan.steps if step.graph.products]
    heads = size_of(R if name in ("cached", "paged") else H // G if name == "packed" else H, spec.graph.sizes)
    assert {size_of(node.inputs[0].shape[-2], graph.sizes) for graph in graphs for node in graph.products} == {heads}
    made = compile_program(plan, on="emulator", validate=False, tuned=False, as_planned=True)
    report = validate(made, quick=True)
    assert report.ok, report


@pytest.mark.parametrize("name", ["cached", "packed", "alone"])
def test_a_decode_step_is_planned_so(name: str) -> None:
    """Where one kernel would have a tile of one row for each head."""
    graph = CHAINS[name].graph.at(T=8192)
    found = candidates(graph, target("cuda:h200"))
    program = program_instead(found)
    assert isinstance(program, ProgramPlan)
    if found.plans:
        assert program.time_us < found.plans[0].cost.time_us


@chain(B=2, G=2, R=4, T=2100, D=32, rounding="eager")
def as_torch_rounds(q: bf16[B, G, R, 1, D], k: bf16[B, G, 1, T, D], v: bf16[B, G, 1, T, D]) -> bf16[B, G, R, 1, D]:
    return F.softmax(q @ k.mT * 0.2) @ v


@pytest.mark.usefixtures("emulated_only")
def test_rounded_as_torch_does_it_is_one_kernel() -> None:
    plan = cheapest(as_torch_rounds.graph, target("cuda:sm_80"))
    assert len(plan.steps) == 1
    report = validate(compile_program(plan, on="emulator", validate=False, tuned=False, as_planned=True), quick=True)
    assert report.ok, report


@chain(B=2, H=4, T=300, D=32)
def own_keys(q: bf16[B, H, 1, D], k: bf16[B, H, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, 1, D]:
    return F.softmax(q @ k.mT) @ v


@chain(B=2, H=4, S=1, T=300, D=32)
def any_rows(q: bf16[B, H, S, D], k: bf16[B, 1, T, D], v: bf16[B, 1, T, D]) -> bf16[B, H, S, D]:
    return F.softmax(q @ k.mT) @ v


@chain(B=2, H=4, T=300, D=32)
def one_has_own(q: bf16[B, H, 1, D], k: bf16[B, 1, T, D], v: bf16[B, H, T, D]) -> bf16[B, H, 1, D]:
    return F.softmax(q @ k.mT) @ v


@chain(B=2, H=4, E=32)
def also_elsewhere(x: bf16[B, H, 1, 1], w: bf16[B, 1, 1, E]) -> bf16[B, H, 1, E]:
    return x @ w + w


@chain(B=32, D=64, T=96)
def one_matrix(x: bf16[B, 1, D], w: bf16[T, D]) -> bf16[B, 1, T]:
    return x @ w.T


@pytest.mark.parametrize("spec", [own_keys, any_rows, one_has_own, also_elsewhere, one_matrix], ids=lambda c: c.name)
def test_other_chains_stay(spec: Chain) -> None:
    """Keys of each head's own, an axis of rows that may be longer, keys that are added to rows, and rows that the rules
    take as they are."""
    assert heads_as_rows(spec.graph) is spec.graph


def test_any_number_of_rows_is_still_called() -> None:
    """Whoever writes S may call it with more than one row."""
    made = fusegen.compile(any_rows, "cuda:h200", on="emulator", validate=False)
    assert not isinstance(made, Program) or "S" not in made.plan.fixed


def test_sizes_that_divide_each_other_come_out_even() -> None:
    graph = packed.graph
    found = even_sizes(graph, {"B": 1, "H": 1, "G": 43, "T": 300, "D": 64}, ["B", "H", "G"])
    assert found["H"] % found["G"] == 0
    assert found["B"] * found["H"] * found["G"] >= 43
    assert comes_out_even(graph, found)
