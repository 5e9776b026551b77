"""Codes that are widened in registers for wgmma: every code, ragged sizes, every tile, broken kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f4e2m1, f8e4m3, f8e8m0, f16, f32, i4, i8, u4
from fusegen import ops as F
from fusegen.language.spec import Chain
from fusegen.language.types import DType
from fusegen.planner import candidates
from fusegen.planner.products.wgmma_codes import CodedTile
from fusegen.planner.programs import kernels_of
from fusegen.planner.programs.lowering import lowered
from fusegen.targets import H200
from fusegen.validation import validate
from tests.emitting.test_codes import bits_of, program_of, spec_of
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

M, N, K = dims("M N K")


def by_wgmma(plan: Any) -> bool:
    return isinstance(plan.tile, CodedTile)


@needs_compiler
@pytest.mark.parametrize("factor", [bf16, f16], ids=str)
@pytest.mark.parametrize("code", [i8, i4, u4, f4e2m1, f8e4m3], ids=str)
def test_every_code_is_multiplied_as_the_number_it_is(code: DType, factor: DType) -> None:
    """By a left factor that has one 1 in each row."""
    spec = spec_of(code, factor, f32, 64, f32, M=128, N=64, K=128)
    every = np.arange(2**code.bits, dtype=np.uint8)
    if code.kind == "int":
        known = every.astype(np.int64) + (0 if code is u4 else -(2 ** (code.bits - 1)))
    else:
        known = every.view(code.numpy).astype(np.float64)
    values = np.stack([np.roll(row, n) for n, row in enumerate(np.resize(known, 64 * 128).reshape(64, 128))]) * 1.0
    scales = np.exp2(np.random.default_rng(1).integers(-9, 9, (64, 2))).astype(np.float32)
    exact = values * np.repeat(scales, 64, -1)
    finite = np.isfinite(exact)  # NaN would reach its whole column
    got = program_of(spec, H200, by_wgmma)(
        np.eye(128, dtype=factor.numpy), bits_of(np.where(finite, values, 0), code), scales
    )
    np.testing.assert_array_equal(got, np.where(finite, exact, 0).T)


@chain(M=40, N=72, K=384)
def with_zeros(x: f16[M, K], w: u4[N, K], s: f32[N, K // 64], z: u4[N, K // 64]) -> f32[M, N]:
    return x @ F.dequantize(w, s, z).T


@chain(M=70, N=80, K=256)
def gated(x: bf16[M, K], a: i8[N, K], b: i8[N, K], s: bf16[N, K // 128], t: bf16[N, K // 128]) -> bf16[M, N]:
    return F.silu(x @ F.dequantize(a, s).T) * (x @ F.dequantize(b, t).T)


@chain(M=70, N=96, K=256)
def with_bias(x: bf16[M, K], w: i4[N, K], s: bf16[N, K // 128], b: bf16[N], r: bf16[M, N]) -> bf16[M, N]:
    return F.gelu(x @ F.dequantize(w, s).T + b) + r


CASES = (
    spec_of(i8, bf16, bf16, 128, bf16, M=65, N=104, K=512),
    spec_of(f8e4m3, f16, f16, 0, f16, M=33, N=136, K=320),
    spec_of(i4, bf16, bf16, 64, bf16, M=130, N=104, K=320),
    spec_of(f4e2m1, bf16, f8e8m0, 64, bf16, M=257, N=56, K=192),
    with_zeros,
    gated,
    with_bias,
)


@needs_compiler
@pytest.mark.parametrize("spec", CASES, ids=lambda spec: str(spec.graph.signature))
def test_ragged_sizes(spec: Chain) -> None:
    validate(program_of(spec, H200, by_wgmma), quick=True).raise_for_error()


def tile_of(rows: int, cols: int, split_k: int = 1, shares: int = 1) -> Callable[[Any], bool]:
    def fits(plan: Any) -> bool:
        return by_wgmma(plan) and (plan.tile.cols, plan.tile.split_k, plan.tile.k_parts) == (cols, split_k, shares)

    fits.__name__ = f"{rows} rows"
    return fits


@needs_compiler
@pytest.mark.parametrize(
    ("rows", "cols", "split_k", "shares"),
    [
        (160, 128, 1, 1),
        (128, 128, 2, 1),
        (40, 128, 4, 1),
        (70, 64, 1, 2),
        (60, 64, 2, 2),
        (20, 128, 1, 2),
        (30, 128, 2, 2),
    ],
)
def test_every_kind_of_tile(rows: int, cols: int, split_k: int, shares: int) -> None:
    spec = spec_of(i4, bf16, bf16, 128, bf16, M=rows, N=200, K=2048)
    program = program_of(spec, H200, tile_of(rows, cols, split_k, shares))
    validate(program, quick=True).raise_for_error()


@needs_compiler
@pytest.mark.parametrize(("code", "group", "depth"), [(i8, 128, 3 * 64), (i4, 64, 5 * 64), (u4, 128, 6 * 64)], ids=str)
def test_stages_that_reach_beyond_k(code: DType, group: int, depth: int) -> None:
    spec = spec_of(code, bf16, f32, 64 if depth % group else group, bf16, M=24, N=72, K=depth)
    validate(program_of(spec, H200, tile_of(24, 128)), quick=True).raise_for_error()


@needs_compiler
@pytest.mark.parametrize("group", [0, 64])
def test_stages_beyond_k_are_zero_whatever_the_scale(group: int) -> None:
    spec = spec_of(i4, bf16, f32, group, f32, M=24, N=72, K=320)
    columns = 5 if group else 1
    scales = np.ones((72, columns), np.float32)
    scales[3, -1], scales[4, -1] = np.inf, np.nan
    kernel = program_of(spec, H200, tile_of(24, 128))
    got = np.asarray(kernel(np.ones((24, 320), bf16.numpy), bits_of(np.ones((72, 320)), i4), scales))
    assert (got[:, 3] == np.inf).all()
    assert np.isnan(got[:, 4]).all()
    np.testing.assert_array_equal(np.delete(got, (3, 4), 1), 320.0)


PLAIN, SPLIT, SHARED = tile_of(130, 128), tile_of(24, 128, 2), tile_of(24, 64, 1, 2)


@needs_compiler
@pytest.mark.parametrize(
    ("code", "fits", "old", "new"),
    [
        (i4, PLAIN, r"lane % 4 \+ 0x4440", "(lane % 4 ^ 1) + 0x4440"),  # the codes of the next lane
        (i4, PLAIN, r"\* 0x1001u", "* 0x0101u"),  # the upper nibble is lost
        (i4, PLAIN, r"0x43084308u", "0x43004300u"),  # no sign
        (i4, PLAIN, r"\^ lane / \d+ % \d\) << 4", ") << 4"),  # not swizzled
        (i4, PLAIN, r"const int number = ", "const int number = 1 ^ "),  # the scale of the neighbouring group
        (i4, PLAIN, r"const int col = min\(", "const int col = 1 ^ min("),  # of the neighbouring column
        (i4, PLAIN, r"scales\[j / 2 % 2\]", "scales[0]"),  # of the lane's other column
        (i4, PLAIN, r"i % 2 != 0 \|\| k != 0", "k != 0"),  # a slice of a group is lost
        (i4, PLAIN, r"wait_at\(full \+ 8 \* stage, parity\);", ""),  # codes that are not there yet
        (i4, PLAIN, r"arrive_at\(empty \+ 8 \* now\)", "arrive_at(empty + 8 * stage)"),  # another place's
        (i4, PLAIN, r"wait_group\.sync\.aligned 0", "wait_group.sync.aligned 1"),  # sums that are not there yet
        (i4, PLAIN, r"\(n8 \* 8 \+ lane % 4 \* 2 \+ j\) \* turned_cols", "(n8 * 8 + lane % 4 * 2) * turned_cols"),
        (i4, PLAIN, r"asm volatile\(\"bar\.sync 1, 256;\" ::: \"memory\"\);\n", "\n"),  # sums that others write
        (i4, SPLIT, r"__cluster_map_shared_rank\(turning, block\)", "__cluster_map_shared_rank(turning, 0)"),
        (i4, SPLIT, r"__cluster_barrier_wait\(\);\n *float added", "float added"),  # sums of a block that is not done
        (i4, SHARED, r"share > 0 \? to", "share > 1 ? to"),  # the sums of one share alone
        (i4, SHARED, r"step \+= 2\)", "step += 1)"),  # stages of the other share
        (i8, PLAIN, r"0x2222 \+ 0x1100", "0x2222 + 0x0011"),  # the codes of a pair swapped
        (i8, PLAIN, r"less = bytes & mask \+ 0x00010001u \| 0x43004300u", "less = 0x43004300u"),  # no code is negative
    ],
)
def test_a_broken_kernel_is_found(code: DType, fits: Callable[[Any], bool], old: str, new: str) -> None:
    spec = spec_of(code, bf16, bf16, 128, bf16, M=int(fits.__name__.split()[0]), N=136, K=2048)
    assert not validate(program_of(spec, H200, fits, (old, new)), quick=True).ok


@needs_compiler
def test_zeros_are_those_of_their_columns_and_groups() -> None:
    for old, new in (
        (r"number / 2\] >> number % 2 \* 4", "number / 2]"),
        (r"\(its_zeros\[0\] & 15u\)", "(its_zeros[1] & 15u)"),
        (r"i % 2 == 0 \? zeros : next_zeros|, next_zeros\);", ", zeros);"),
    ):
        assert not validate(program_of(with_zeros, H200, by_wgmma, (old, new)), quick=True).ok


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (spec_of(i4, bf16, bf16, 32, bf16, M=512, N=256, K=256), "slices of 64 of K are scaled"),
        (spec_of(i4, bf16, bf16, 128, bf16, M=16, N=256, K=256), "no tile for 16 rows"),
    ],
)
def test_what_is_refused(spec: Chain, says: str) -> None:
    found = candidates(lowered(spec.graph).graph, H200)
    assert any(says in refusal.reason for refusal in found.refusals if refusal.rule == "wgmma_codes")


def test_more_rows_are_multiplied_by_wgmma_and_few_by_mma() -> None:
    def rule(rows: int) -> str:
        graph = lowered(spec_of(i4, bf16, bf16, 128, bf16, M=rows, N=8192, K=8192).graph).graph
        return candidates(graph, H200).need()[0].rule

    assert (rule(8), rule(32), rule(4096)) == ("gemm", "wgmma", "wgmma")


def test_of_thousands_of_rows_a_kernel_dequantizes_first() -> None:
    """By one kernel 2048 rows took 404 us on an H200, and by two 358."""

    def kernels(code: DType, rows: int) -> int:
        _, program = kernels_of(spec_of(code, bf16, bf16, 128, bf16, M=rows, N=8192, K=8192).graph, H200)
        return len(program.steps) if program else 1

    assert [kernels(i4, rows) for rows in (128, 1024, 4096)] == [1, 1, 2]
    assert [kernels(i8, rows) for rows in (128, 512, 4096)] == [1, 1, 2]
