"""Kernels of a program that begin while those before them run: what they wait for, and that a missing wait is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emulator import EmulatorUnavailable, KernelFault, compiler
from fusegen.language.spec import Chain
from fusegen.pipeline import compile_program
from fusegen.planner.products.wgmma import WgmmaPlan
from fusegen.planner.programs import kernels_of, step_candidates
from fusegen.planner.programs.model import ProgramPlan
from fusegen.planner.programs.side_by_side import JoinedSource
from fusegen.runtime import Kernel, Program
from fusegen.runtime.emulated import RUNNING
from fusegen.runtime.joined import Joined
from fusegen.targets import H200
from fusegen.validation import validate
from tests.chains_cut import below_best, logits_topk, lora, mlp, residual_norm, routed

pytestmark = pytest.mark.usefixtures("emulated_only")

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

M, N, K = dims("M N K")
WAIT = "griddepcontrol.wait"
WIDE = mlp.at(M=256, H=512, K=256)  # by wgmma


@chain(M=40, N=256, K=192)
def column_means(x: f32[M, N], w: bf16[K, N]) -> tuple[f32[1, N], bf16[M, K]]:
    """Columns' sums by parts, and a product beside them."""
    return F.sum(x, over=M), F.cast(x, bf16) @ w.T


@chain(M=24, N=96)
def put_and_read(x: f32[M, N], table: f32[M, N], slots: i32[M]) -> tuple[f32[M, N], f32[M, 1]]:
    """Rows are written into a table, which is read behind that."""
    written = F.scatter(table, slots, F.exp(x))
    return written, F.sum(written * x)


@chain(M=24, N=96, K=64)
def two_widths(x: bf16[M, K], w: bf16[N, K]) -> tuple[f32[M, 32], f32[M, 64]]:
    """A product, and two steps behind it in one launch."""
    h = F.cast(x @ w.T, bf16)
    return F.softmax(h[..., :32]), F.softmax(h[..., 32:96])


# ---------------------------------------------------------------- launches in the emulator

CHAINS = (mlp, WIDE, lora, logits_topk, residual_norm, below_best, column_means, put_and_read, two_widths, routed)


def named(spec: Chain) -> str:
    return f"{spec.name} {spec.graph.sizes_text()}"


def made(spec: Chain) -> Program:
    found = fusegen.compile(spec, H200, on="emulator", validate=False)
    assert isinstance(found, Program)
    return found


def operands(spec: Chain) -> list[Any]:
    rng = np.random.default_rng(0)
    found: list[Any] = []
    for tensor in spec.graph.inputs:
        shape = [spec.graph.sizes[str(size)] for size in tensor.shape]
        values = rng.permutation(shape[0]) if tensor.dtype is i32 else rng.integers(-2, 3, shape) if shape else 0.5
        found.append(np.asarray(values).astype(tensor.dtype.numpy) if shape else values)
    return found


def no_other(*asked: Any) -> Any:
    pytest.fail(f"another variant is asked for: {asked}")


def with_text(program: Program, place: int, change: Callable[[str], str]) -> Program:
    """The program, one launch's text changed."""
    kernels = list(program.kernels)
    source = kernels[place].source
    changed = change(source.text)
    assert changed != source.text
    if isinstance(source, JoinedSource):
        kernels[place] = Joined(replace(source, text=changed), None, program.device, no_other, no_other, no_other)
    else:
        kernels[place] = Kernel(replace(source, text=changed), None, program.device, no_other)
    return Program(program.plan, kernels, program.device)


def without_wait(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if WAIT not in line) + "\n"


def waiting_last(text: str) -> str:
    """The wait behind all else."""
    return f'{without_wait(text).rstrip()[:-1]}  asm volatile("{WAIT};" ::: "memory");\n}}\n'


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    return {named(spec): made(spec) for spec in CHAINS}


@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: named(spec))
def test_a_missing_wait_and_a_late_one_are_found(spec: Chain, programs: dict[str, Program]) -> None:
    """Of each kernel of these: rows, selections, columns by parts, products by mma.sync and by wgmma, scatters."""
    program = programs[named(spec)]
    given = operands(spec)
    program(*given)
    assert sum(plan.waits for plan in program.plan.launched) == len(program.kernels) - 1
    for place in range(1, len(program.kernels)):
        depends = touches_shared(program.plan, place)
        for change in (without_wait, waiting_last):
            if change is waiting_last and not depends:  # then it is in time
                with_text(program, place, change)(*given)
                continue
            with pytest.raises(KernelFault, match=r"launch before this one|launches before it") as caught:
                with_text(program, place, change)(*given)
            assert caught.value.kind == "race"
            assert not depends or caught.value.line is not None


def touches_shared(plan: ProgramPlan, place: int) -> bool:
    """Does it read what a launch before it writes, or write where one reads or writes?"""
    before = [step for steps in plan.launches[:place] for step in steps]
    made, touched = {b.base for s in before for b in s.writes}, {b.base for s in before for b in s.bindings}
    offsets = plan.arena(plan.graph.sizes).offsets
    read, written = ({b.base for s in plan.launches[place] for b in getattr(s, n)} for n in ("reads", "writes"))
    return bool(read & made) or bool({offsets[n] for n in written & set(offsets)} & {offsets.get(n) for n in touched})


def test_reading_ahead_what_a_kernel_before_writes_is_found() -> None:
    """A planner that took h for a weight."""
    program = made(mlp)

    def swapped(text: str) -> str:
        wait = next(line for line in text.splitlines() if WAIT in line)
        early = "  for (int s = 0; s < 2; ++s) if (s < steps) copy_left(s);\n"
        assert "copy_left" in text
        return text.replace(f"{wait}\n", f"{early}{wait}\n")

    with pytest.raises(KernelFault, match="of h of mlp_h, which a launch before this one may still be writing"):
        with_text(program, 1, swapped)(*operands(mlp))


ASKED = "ask_cache_for(up_ptr + likely * up_group + likely_col * up_ld, 128);"


@pytest.mark.parametrize(("wrong", "says", "kind"), [
    (ASKED.replace("128", "8192"), "of up", "out-of-bounds"),
    (ASKED.replace("likely_col", "(likely_col + 8)"), "of up", "out-of-bounds"),
    ("ask_cache_for(ends_ptr, 16);", "ends of .* which a launch before this one may still be writing", "race"),
])  # fmt: skip
def test_asking_a_cache_for_what_is_not_there_yet_is_found(
    wrong: str, says: str, kind: str, programs: dict[str, Program]
) -> None:
    program = programs[named(routed)]
    with pytest.raises(KernelFault, match=says) as caught:
        with_text(program, len(program.kernels) - 1, lambda text: text.replace(ASKED, wrong))(*operands(routed))
    assert caught.value.kind == kind


@pytest.mark.parametrize("chosen", [
    [t % 8 for t in range(48)], [5] * 48, [7, *[2] * 46, 0], [0, 6] * 24,
], ids=["all", "one", "alone", "two"])  # fmt: skip
def test_what_a_cache_is_asked_for_in_vain_changes_nothing(chosen: list[int], programs: dict[str, Program]) -> None:
    """Blocks ask for weights as if every group had one row of tiles: here groups are empty, long, and of one row."""
    rng = np.random.default_rng(1)
    x, router = rng.integers(-2, 3, (48, 64)), np.zeros((8, 64), int)
    gate, up = rng.integers(-1, 2, (8, 40, 64)), rng.integers(-1, 2, (8, 40, 64))
    x[:, :8], router[:, :8] = 0, np.eye(8)
    x[np.arange(48), chosen] = 4
    order = np.argsort(chosen, kind="stable")
    left, right = (np.einsum("td,thd->th", x[order], w[np.array(chosen)[order]]) for w in (gate, up))
    found = programs[named(routed)](*(np.asarray(v, float).astype(bf16.numpy) for v in (x, router, gate, up)))
    np.testing.assert_allclose(found.astype(float), left / (1 + np.exp(-left)) * right, rtol=2e-2, atol=1e-2)


def test_the_first_kernel_that_runs_is_launched_when_the_stream_is_done(programs: dict[str, Program]) -> None:
    program = programs[named(mlp)]
    program(*operands(mlp))
    launches = next(iter(program.records.values())).launches
    assert [launch.record.launch.dependent for launch in launches] == [False, True]
    empty = [np.zeros((0, 64), bf16.numpy), *operands(mlp)[1:]]
    assert program(*empty).shape == (0, 64)
    parts = programs[named(column_means)]
    none = [np.zeros((0, 256), np.float32), operands(column_means)[1]]
    sums, _ = parts(*none)
    assert not sums.any()
    record = list(parts.records.values())[-1]
    ran = [launch.record.launch.dependent for launch in record.launches if launch.record.loaded is not None]
    assert ran == [False, *[True] * (len(ran) - 1)]


def test_a_launch_between_two_calls_ends_what_was_unfinished(programs: dict[str, Program]) -> None:
    program = programs[named(mlp)]
    program(*operands(mlp))
    assert {b.name for b in RUNNING.touched} == {
        "x of mlp_h", "gate of mlp_h", "up of mlp_h", "h of mlp_h", "down of mlp_out", "h of mlp_out", "out of mlp_out",
    }  # fmt: skip
    first = program.kernels[0]
    assert isinstance(first, Kernel)
    first(*operands(mlp)[:3])
    assert {b.name for b in RUNNING.touched} == {"x of mlp_h", "gate of mlp_h", "up of mlp_h", "h of mlp_h"}


def test_every_schedule_asks_ahead_for_factors_that_no_kernel_before_writes() -> None:
    """By wgmma: ping-pong, cooperative, and where a cluster's blocks share a tile's K."""
    graph = mlp.at(M=77, H=1024, K=128).graph
    _, program = kernels_of(graph, H200)
    assert program is not None
    *before, last = program.steps
    kinds: dict[tuple[str, bool], WgmmaPlan] = {}
    for plan in step_candidates(program, last).plans:
        if isinstance(plan, WgmmaPlan) and plan.slices_ahead:
            kinds.setdefault((plan.tile.schedule, plan.tile.split_k > 1), plan)
    assert set(kinds) == {("pingpong", False), ("cooperative", False), ("cooperative", True)}
    for plan in kinds.values():
        chosen = replace(program, steps=(*before, replace(last, plan=plan)))
        kernels = compile_program(chosen, on="emulator", validate=False, tuned=False, as_planned=True)
        report = validate(kernels, quick=True, cases=["normal"])
        assert report.cases
        assert report.ok, f"{plan.configuration}\n{report}"
