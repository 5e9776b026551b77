"""Cutting chains into programs: which values lie between kernels, as what type, where, and for which reason."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusegen import Chain, bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.errors import NoPlan
from fusegen.planner.products.factors import lacking
from fusegen.planner.programs.model import ALIGNMENT, ProgramPlan, arranged
from fusegen.planner.programs.search import Search, cheapest
from fusegen.targets import A100, GOLDEN_TARGETS, H200, MI300X, Target
from tests.chains_cut import CHAINS, best_masked, lora, mlp, residual_norm, side_by_side, two_selections
from tests.specs import PRODUCTS, PROGRAMS

M, N, K = dims("M N K")


def cut(spec: Chain, target: Target = H200) -> ProgramPlan:
    return cheapest(spec.graph, target)


@pytest.mark.parametrize("target", [H200, A100, MI300X], ids=str)
@pytest.mark.parametrize("spec", CHAINS, ids=lambda c: c.name)
def test_every_value_is_written_before_it_is_read(spec: Chain, target: Target) -> None:
    program = cut(spec, target)
    there = {t.name for t in spec.graph.inputs}
    for step in program.steps:
        assert {b.base for b in step.reads} <= there
        assert set(step.values) <= there
        written = {b.base for b in step.writes}
        assert not written & there
        there |= written
    assert {t.name for t in spec.graph.outputs} <= there
    assert [s.name for s in program.between] == list(dict.fromkeys(s.name for s in program.between))


def test_what_products_read_is_stored_as_they_round_it() -> None:
    (between,) = cut(mlp).between
    assert (between.name, between.type.dtype) == ("h", bf16)
    assert "each needs a kernel of its own" in between.why


def test_an_output_is_what_the_next_kernel_reads() -> None:
    program = cut(residual_norm.at(M=4096, N=4096, K=4096))
    assert not program.between
    assert [b.base for b in program.steps[1].reads] == ["gamma", "h"]
    (stored,) = program.boundaries
    assert (stored.home, program.ends(stored)) == ("output", (0, (1,)))
    assert "reduces rows of a product" in stored.why


def test_views_that_one_kernel_holds_are_not_cut() -> None:
    """As of a chain without views, whose one kernel is taken as it is: nothing else is looked at."""

    @chain(M=16, N=203)
    def spread(x: bf16[M, N]) -> f32[M]:
        return F.logsumexp(x) - F.mean(x)

    search = Search(spread.graph, H200)
    assert search.run() is not None
    assert len(search.looked_at) == 1


def test_the_cuts_looked_at_stand_in_the_plan() -> None:
    program = cut(lora)
    taken = {stored.name for stored in program.boundaries}
    first, *others = program.cuts
    assert set(first.stored) == taken
    assert first.time_us == pytest.approx(program.time_us)
    times = [c.time_us for c in others if c.time_us is not None]
    assert times == sorted(times)
    assert min(times) >= program.time_us
    (one,) = (c for c in program.cuts if not c.stored)
    assert one.time_us is None
    assert "takes what another one gives" in one.reason


def test_nothing_is_written_that_no_kernel_reads() -> None:
    for spec in (*CHAINS, residual_norm.at(M=200, N=200, K=200), residual_norm.at(M=136, N=1024, K=136)):
        program = cut(spec)
        read = {binding.base for step in program.steps for binding in step.reads}
        written = {binding.base for step in program.steps for binding in step.writes}
        assert written <= read | {t.name for t in spec.graph.outputs}
        assert {stored.name for stored in program.between} <= read


def test_other_values_are_stored_as_f32() -> None:
    types = {s.name: s.type.dtype for s in cut(lora).between}
    assert set(types.values()) == {f32, bf16}


def test_what_was_chosen_by_is_not_computed_twice() -> None:
    """Rounded otherwise in another kernel, the least of the best would not be among them."""
    program = cut(best_masked)
    assert len(program.steps) == 2
    assert len(program.between) == 2


@pytest.mark.parametrize("spec", [two_selections, side_by_side], ids=lambda c: c.name)
def test_what_has_nothing_in_common_is_a_kernel_each(spec: Chain) -> None:
    program = cut(spec)
    assert len(program.steps) == 2
    assert program.arena(spec.graph.sizes).bytes == 0


def test_a_factor_in_another_shape_is_stored_as_the_chain_casts_it() -> None:
    """And not the product in f32, which the second one's kernel would cast for each of its tiles."""
    S, T, H = dims("S T H")

    @chain(S=2048, T=2048, H=16, K=128)
    def projected(x: bf16[S, K], w: bf16[H * K, K], k: bf16[T, K]) -> bf16[S, H, T]:
        return F.rearrange(F.cast(x @ w.T, bf16), "s (h k) -> s h k", h=H) @ k.T

    program = cut(projected)
    assert [step.plan.rule for step in program.steps] == ["wgmma", "wgmma"]
    assert [stored.type.dtype for stored in program.between] == [bf16]


def test_a_chain_of_products_shares_its_workspace() -> None:
    @chain(M=1024, N=256, K=256)
    def deep(x: bf16[M, K], a: bf16[K, K], b: bf16[K, K], c: bf16[K, K], d: bf16[N, K]) -> bf16[M, N]:
        return (((x @ a.T) @ b.T) @ c.T) @ d.T

    program = cut(deep)
    assert len(program.steps) == 4
    arena = program.arena(deep.graph.sizes)
    assert arena.bytes == 2 * 1024 * 256 * 2
    assert sorted(arena.offsets.values()) == [0, 0, 1024 * 256 * 2]


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5), st.integers(0, 3)), max_size=8))
def test_what_lives_at_once_lies_apart(tensors: list[tuple[int, int, int]]) -> None:
    nbytes = {f"t{i}": size for i, (size, _, _) in enumerate(tensors)}
    lives: Mapping[str, tuple[int, int]] = {f"t{i}": (a, a + n) for i, (_, a, n) in enumerate(tensors)}
    arena = arranged(nbytes, lives)
    for name, offset in arena.offsets.items():
        assert offset % ALIGNMENT == 0
        assert offset + nbytes[name] <= arena.bytes
    for one, two in itertools.combinations(nbytes, 2):
        if lives[one][0] <= lives[two][1] and lives[two][0] <= lives[one][1]:
            low, high = sorted((one, two), key=lambda name: (arena.offsets[name], nbytes[name]))
            assert arena.offsets[low] + nbytes[low] <= arena.offsets[high] or not nbytes[low]


def test_a_value_that_a_further_cut_makes_idle_is_no_longer_written() -> None:
    """The first cut named, behind the roll, is one that the second makes within its own kernel."""

    @chain(M=6, N=8)
    def rolled(x: f32[M, N]) -> f32[8 * M, N]:
        x = F.roll(x, 1, 0)
        for _ in range(3):
            x = F.concat([x, x * 2], 0)
        return x

    assert [stored.type.shape for stored in cheapest(rolled.graph, H200).between] == [(2 * M, N)]


def test_no_program_is_handed_out_above_a_limit() -> None:
    with pytest.raises(NoPlan, match="no program"):
        cheapest(mlp.graph, H200, below_us=0.1)


@pytest.mark.parametrize("target", GOLDEN_TARGETS, ids=str)
def test_shipped_specs_are_one_kernel_or_programs(target: Target) -> None:
    """As they are committed, which tests of golden sources hold to what is planned: a program in a folder."""

    def several(spec: Chain) -> bool:
        return (Path("generated") / target.folder / spec.name).is_dir()

    assert all(several(spec) for spec in PROGRAMS.values() if not lacking(spec.graph, target))
    assert not any(several(spec) for spec in PRODUCTS.values())


def test_a_plan_says_what_lies_where_and_why() -> None:
    text = str(cut(mlp))
    assert "2 kernels" in text
    assert "1. mlp_h: x, gate, up -> h" in text
    assert "2. mlp_out: down, h -> out" in text
    assert "h bf16[M, H]  4608 B, at byte 0 of the workspace, from kernel 1 to 2" in text
    assert "the product at line " in text, "a plan is the same wherever its spec lies"


def test_views_of_the_same_rows_count_as_their_bytes_once() -> None:
    """Four taps of a padded operand: what a later view shows is in a cache."""

    @chain(M=4096, N=2048)
    def taps(x: bf16[M + 3, N], w: bf16[4, N]) -> bf16[M, N]:
        return x[:-3] * w[0] + x[1:-2] * w[1] + x[2:-1] * w[2] + x[3:] * w[3]

    (step,) = cheapest(taps.graph, H200).steps
    assert sorted(part for part, _ in step.plan.layout.again) == ["x_offset_1", "x_offset_2", "x_offset_3"]
    assert step.plan.cost.traffic.moved < 2.01 * 4096 * 2048 * 2
