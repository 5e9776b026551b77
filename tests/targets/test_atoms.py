"""Matrix units: where sums lie in registers, against the tables of the vendors' manuals, and as the C of kernels."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from fusegen.language.types import bf16, f8e4m3, f16, f32, i8
from fusegen.planner import candidates
from fusegen.targets import B200, B300, H200, RTX5090, TARGETS, Target, target
from fusegen.targets.atoms import Atom, Fragment, Term
from tests import gemms

ATOMS = {atom.instruction + atom.word: atom for each in TARGETS.values() for atom in each.atoms}


def rows_of(atom: Atom) -> int:
    """Of a warp's registers: of sums in tensor memory it loads 16 of its 32 rows at a time."""
    return 16 if atom.sums == "tensor memory" else atom.warp_rows


def held(atom: Atom) -> int:
    """Elements of a lane."""
    return rows_of(atom) * atom.col_step // atom.fragment.lanes


def every(atom: Atom) -> list[tuple[int, int]]:
    """Each element of each lane of a warp."""
    return list(itertools.product(range(held(atom)), range(atom.fragment.lanes)))


def manual(atom: Atom, i: int, lane: int) -> tuple[int, int]:
    """Row and column of the product, as the manuals number them for the instruction."""
    if atom.kind == "mfma":  # CDNA 3 ISA, "Matrix core": rows of the output go by register, columns by lane
        block, row = divmod(lane, atom.cols)
        return row, 8 * (i >> 2) + 4 * block + (i & 3) if atom.cols == 32 else 4 * block + i
    if atom.kind == "wmma":  # likewise; RDNA 3: rows of the output by turns of lanes, RDNA 4: 8 of each lane
        return lane % 16, 8 * (lane // 16) + i if "gfx12" in atom.instruction else 2 * i + lane // 16
    group, thread = lane >> 2, lane & 3  # PTX ISA: groupID and threadID_in_group
    if atom.kind == "mma":  # c0, c1: row groupID; c2, c3: row groupID + 8; column threadID_in_group * 2 + (i & 1)
        return thread * 2 + (i & 1), group if i < 2 else group + 8
    # wgmma's D, of the warp's own 16 rows, and what tcgen05.ld.16x256b loads
    return group + (8 if i & 2 else 0), thread * 2 + (i & 1) + 8 * (i >> 2)


@pytest.mark.parametrize("name", ATOMS)
def test_sums_lie_as_the_manuals_say(name: str) -> None:
    atom = ATOMS[name]
    for i, lane in every(atom):
        assert (atom.fragment.row(i, lane), atom.fragment.col(i, lane)) == manual(atom, i, lane)


@pytest.mark.parametrize("name", ATOMS)
def test_each_sum_is_held_once(name: str) -> None:
    atom = ATOMS[name]
    found = sorted((atom.fragment.row(i, lane), atom.fragment.col(i, lane)) for i, lane in every(atom))
    assert found == list(itertools.product(range(rows_of(atom)), range(atom.col_step)))


def said(text: str, **values: int) -> int:
    """What C makes of an expression of unsigned numbers."""
    assert re.fullmatch(r"[\w %/*+]+", text)
    return int(eval(text.replace("/", "//"), {}, values))


@pytest.mark.parametrize("name", ATOMS)
def test_text_says_the_same(name: str) -> None:
    fragment = ATOMS[name].fragment
    for i, lane in every(ATOMS[name]):
        assert said(fragment.row_text(("i", 1)), i=i, lane=lane) == fragment.row(i, lane)
        assert said(fragment.col_text(("i", 1)), i=i, lane=lane) == fragment.col(i, lane)


def test_elements_are_counted_by_several_variables() -> None:
    """As wgmma's epilogue does: columns of 8, rows 8 apart, pairs."""
    (atom,) = H200.atoms_of("warpgroup", f16)
    parts = ("n8", 4), ("r8", 2), ("j", 1)
    assert atom.fragment.row_text(*parts) == "r8 * 8 + lane / 4"
    assert atom.fragment.col_text(*parts[:2]) == "n8 * 8 + lane % 4 * 2"  # of a pair's first
    assert atom.fragment.col_text(*parts) == "n8 * 8 + lane % 4 * 2 + j"
    assert atom.fragment.row_text(("quarter", 2)) == "quarter % 2 * 8 + lane / 4"
    for n8, r8, j, lane in itertools.product(range(4), range(2), range(2), range(32)):
        col = said(atom.fragment.col_text(*parts), n8=n8, r8=r8, j=j, lane=lane)
        assert col == atom.fragment.col(n8 * 4 + r8 * 2 + j, lane)
    with pytest.raises(ValueError, match="takes more of an element's number than r, one of"):
        atom.fragment.col_text(("n", 8), ("r", 4))


@pytest.mark.parametrize("name", ATOMS)
def test_lanes_that_share_a_row_are_found_bit_by_bit(name: str) -> None:
    """What reduces a row over lanes, by shuffles, meets each lane that holds a part of it, and no other one."""
    atom = ATOMS[name]
    fragment = atom.fragment
    for bits, place in ((fragment.lanes_of_row, fragment.row), (fragment.lanes_of_col, fragment.col)):
        for lane in range(fragment.lanes):
            met = {lane}
            for bit in bits:
                met |= {other ^ bit for other in met}
            own = {place(i, lane) for i in range(held(atom))}
            assert met == {
                other for other in range(fragment.lanes) if own & {place(i, other) for i in range(held(atom))}
            }


def test_sums_of_one_product_are_fragments_of_the_next_ones_left_factor() -> None:
    for atom in H200.atoms_of("warpgroup", bf16):
        assert atom.left_fragment == atom.fragment


def test_a_unit_that_a_chain_has_no_factors_for_changes_nothing() -> None:
    """As tcgen05's of 8-bit floats: a thread issues it, and a warp may load 32 rows of its sums, one a lane."""
    rows = Fragment((Term("lane"),), (Term("i"),), lanes=32)
    tcgen05 = Atom(
        kind="tcgen05", instruction="tcgen05.mma.kind::f8f6f4", factors=f8e4m3, word="f8f6f4", rows=128, cols=256,
        col_step=16, k=32, issuer="thread", left=("shared memory", "tensor memory"), right=("shared memory",),
        sums="tensor memory", fragment=rows, warps=4,
    )  # fmt: skip
    assert (tcgen05.threads, tcgen05.warp_rows, tcgen05.accumulators) == (128, 32, 16)
    assert tcgen05.fragment.lanes_of_row == (), "a lane reduces its row by itself"
    found = replace(B200, atoms=(tcgen05, *B200.atoms))
    for graph in (gemms.residual.graph, gemms.norm_swiglu.graph):
        plans, usual = candidates(graph, found).plans, candidates(graph, B200).plans
        assert [p.configuration for p in plans] == [p.configuration for p in usual]


def test_factors_that_no_unit_multiplies_are_refused() -> None:
    halves = tuple(atom for atom in H200.atoms if atom.factors is not bf16)
    refused = {r.rule: r.reason for r in candidates(gemms.norm_swiglu.graph, replace(H200, atoms=halves)).refusals}
    assert refused["gemm"] == "sm_90a has no matrix instruction of a warp for factors of bf16"
    assert refused["wgmma"] == "sm_90a has no wgmma for factors of bf16"
    assert candidates(gemms.residual.graph, replace(H200, atoms=halves)).plans


def test_targets_name_what_they_have() -> None:
    def names(found: Target, issuer: str) -> set[str]:
        return {atom.instruction for atom in found.atoms if atom.issuer == issuer}

    assert names(H200, "warpgroup") == {f"wgmma.mma_async.m64nNk{k}" for k in (8, 16, 32)}
    assert names(B200, "warpgroup") == names(target("cuda:sm_90"), "warpgroup") == set()
    assert names(B200, "thread") == {f"tcgen05.mma.m128nNk{k}" for k in (8, 16, 32)}
    assert names(target("cuda:sm_100"), "thread") == set(), "code for every compute capability 10 has none"
    assert names(B200, "warp") == {f"mma.sync.m16n8k{k}" for k in (8, 16, 32)}
    assert names(B300, "thread") == names(B200, "thread")
    assert B200.atoms_of("thread", i8)
    assert not B300.atoms_of("thread", i8), "ptxas knows no .kind::i8 for sm_103a"
    assert {atom.issuer for atom in RTX5090.atoms} == {"warp"}
    assert [atom.rows for atom in target("hip:mi300x").atoms_of("warp", f32)] == [32, 16]


@pytest.mark.parametrize("name", ATOMS)
def test_an_instruction_fills_a_fragment_of_16_or_32_bytes(name: str) -> None:
    """Of each row of the factors: what their loads and their swizzles are made for."""
    atom = ATOMS[name]
    assert atom.k * atom.factors.bytes in ((32,) if atom.kind != "mfma" else (32, 64))
    assert atom.k % atom.instructions == 0


def test_a_term_is_a_digit() -> None:
    term = Term("i", div=2, mod=4, times=16)
    assert [term.value(i, 0) for i in (0, 1, 2, 7, 8, 9)] == [0, 0, 16, 48, 0, 0]
    assert term.text((("i", 1),)) == "i / 2 % 4 * 16"
    assert Fragment((term,), (), 32).lanes_of_row == (1, 2, 4, 8, 16)
