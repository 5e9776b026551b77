"""Codes that are widened in shared memory for wgmma: every code, ragged sizes, every tile, broken kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f4e2m1, f8e4m3, f8e8m0, f16, f32, i4, i8, u4
from fusegen import ops as F
from fusegen.emitting.products.mma_codes import WIDENINGS
from fusegen.emitting.products.wgmma_widened import natural_order
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


@pytest.mark.parametrize(("code", "factor"), WIDENINGS, ids=str)
def test_numbers_lie_in_their_own_order(code: DType, factor: DType) -> None:
    """What the words of __byte_perm pick of the pairs that a widening makes."""
    pairs = WIDENINGS[code, factor].pairs
    halves = [number for pair in pairs for number in pair]  # by word, the low one first
    found = []
    for low, high, selector in re.findall(r"pairs\[(\d)\](?:, pairs\[(\d)\], 0x(\w{4}))?", natural_order(pairs)):
        words = (int(low), int(high or low))
        for nibble in (selector[3], selector[1]) if selector else "02":  # the low byte of each half
            found.append(halves[2 * words[int(nibble) // 4] + int(nibble) % 4 // 2])
    assert found == list(range(8))


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


@needs_compiler
@pytest.mark.parametrize(
    "fits",
    [
        lambda t: t.rows == 256,
        lambda t: t.cols == 192,
        lambda t: t.split_k == 2 and t.cols == 128,
        lambda t: t.split_k == 4 and t.cols == 64,
        lambda t: t.cols == 64 and t.split_k == 1,
    ],
    ids=["256 rows", "192 columns", "split-K by 2", "split-K by 4", "64 columns"],
)
def test_every_kind_of_tile(fits: Callable[[CodedTile], bool]) -> None:
    spec = spec_of(i4, bf16, bf16, 128, bf16, M=160, N=200, K=2048)
    program = program_of(spec, H200, lambda plan: by_wgmma(plan) and fits(plan.tile))
    validate(program, quick=True).raise_for_error()


@needs_compiler
@pytest.mark.parametrize(
    ("code", "old", "new"),
    [
        (i4, r"words\[0\] >> i \* 4", "words[0] >> (i ^ 1) * 4"),  # swapped nibbles
        (i4, r"0x43084308u", "0x43004300u"),  # no sign
        (i4, r"0x7632\)\};", "0x5432)};"),  # a number twice
        (i4, r"\^ column % 8\) << 4", "^ column % 4) << 4"),  # not where wgmma looks
        (i4, r"step \* tile_k / 128\]", "(step * tile_k / 128 ^ 1)]"),  # the scale of the neighbouring group
        (i4, r"\[col \* (s\w*_ld)", r"[(col ^ 1) * \1"),  # of the neighbouring column
        (i4, r"shared \+ codes_at \+ stage \* code_bytes", "shared + codes_at"),  # codes of the first place again
        (i4, r"asm volatile\(\"fence\.proxy\.async\.shared::cta;\" ::: \"memory\"\);  // wgmma", "//"),  # not told
        (i4, r"\* by\.at\[j % 2\]", "* by.at[0]"),  # of the neighbour in a pair
        (i4, r"wait_at\(full \+ 8 \* stage, parity\);", ""),  # codes that are not there yet
        (i4, r"wait_at\(widened \+ 8 \* stage, parity\);", ""),  # numbers that are not there yet
        (i4, r"arrive_at\(empty \+ 8 \* \(stage \+ 1\)\)", "arrive_at(empty + 8 * stage)"),  # another place's
        (i8, r"words\[i / 2\] >> i % 2 \* 8", "words[i / 2] >> (1 - i % 2) * 8"),  # the codes of a pair swapped
        (i8, r"less = bytes & mask \+ 0x00010001u \| 0x43004300u", "less = 0x43004300u"),  # no code is negative
    ],
)
def test_a_broken_kernel_is_found(code: DType, old: str, new: str) -> None:
    spec = spec_of(code, bf16, bf16, 128, bf16, M=130, N=72, K=2048)

    def fits(plan: Any) -> bool:
        return by_wgmma(plan) and plan.tile.split_k == 1 and plan.tile.cols == 64

    assert not validate(program_of(spec, H200, fits, (old, new)), quick=True).ok


@needs_compiler
def test_zeros_are_those_of_their_columns_and_groups() -> None:
    for old, new in ((r" % 2 \* 4 & 15u", " % 2 * 0 & 15u"), (r"column = piece / 2,", "column = piece / 2 ^ 1,")):
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


def test_many_rows_are_multiplied_by_wgmma_and_few_by_mma() -> None:
    def rule(rows: int) -> str:
        graph = lowered(spec_of(i4, bf16, bf16, 128, bf16, M=rows, N=8192, K=8192).graph).graph
        return candidates(graph, H200).need()[0].rule

    assert (rule(8), rule(512), rule(4096)) == ("gemm", "wgmma", "wgmma")


def test_of_thousands_of_rows_a_kernel_dequantizes_first() -> None:
    """By one kernel 4096 rows took 1037 us on an H200, and by two 662."""

    def kernels(code: DType, rows: int) -> int:
        _, program = kernels_of(spec_of(code, bf16, bf16, 128, bf16, M=rows, N=8192, K=8192).graph, H200)
        return len(program.steps) if program else 1

    assert [kernels(i4, rows) for rows in (128, 1024, 4096)] == [1, 1, 2]
    assert [kernels(i8, rows) for rows in (128, 512, 4096)] == [1, 1, 2]
