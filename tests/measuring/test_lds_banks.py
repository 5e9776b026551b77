"""Conflicts in banks of the LDS, counted by addresses of machine code: of hand-written code, and of shipped kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

import fusegen
from fusegen.compiling import compiler_version
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.language.spec import load_chains
from fusegen.measuring.lds_banks import cycles_of
from fusegen.measuring.machine_loops import parsed, turn_of
from fusegen.measuring.simulating import simulated
from fusegen.measuring.simulation import Feed, Simulated, simulate
from fusegen.planner.attention.parts import ScoresPlan
from fusegen.planner.products.gemm import GemmPlan
from fusegen.planner.programs.model import ProgramPlan
from fusegen.runtime.cache import compiled
from fusegen.targets import MI250X, MI300X, MI355X, Target
from fusegen.targets.compute_unit import unit_of
from tests.tools import needs_compiler

SHIPPED = {one.name: one for one in load_chains(Path(__file__).parents[2] / "specs")}
MFMA = "v_mfma_f32_32x32x8_bf16 v[40:55], v[60:61], v[62:63], v[40:55]"


def cycles(*texts: str, on: Target = MI300X, waves: int = 1) -> float | None:
    """Of the last one of these, in a loop behind the others; None where its address is not known."""
    before, last = texts[:-1], texts[-1]
    start = 8 * len(before)
    lines = [*before, last, MFMA, f"s_cbranch_scc1 65000  -> {start:x}", "s_endpgm"]
    listing = "\n".join(f"{place * 8:6x}  {text}" for place, text in enumerate(lines))
    turn, unit = turn_of(listing), unit_of(on)
    assert turn is not None
    assert unit is not None
    return cycles_of(parsed(listing), turn, unit, waves).get(start)


def apart(nbytes: int) -> str:
    """Lanes' addresses, so far from each other."""
    return f"v_mul_u32_u24_e32 v1, {nbytes}, v0"


@pytest.mark.parametrize(
    ("instruction", "nbytes", "expected"),
    [
        ("ds_read_b32 v2, v1", 4, 2),  # all banks, for 32 lanes at once
        ("ds_read_b32 v2, v1", 0, 2),  # one word, for all of them
        ("ds_read_b32 v2, v1", 8, 4),
        ("ds_read_b32 v2, v1", 128, 64),  # one bank
        ("ds_read_b32 v2, v1", 132, 2),
        ("ds_write_b16 v1, v2", 2, 2),  # two lanes write one word
        ("ds_write_b16 v1, v2", 640, 64),
        ("ds_write_b64 v1, v[2:3]", 8, 4),
        ("ds_write_b64 v1, v[2:3]", 16, 8),
        ("ds_read2_b64 v[2:5], v1 offset0:64 offset1:68", 8, 8),  # twice
        ("ds_write_b128 v1, v[2:5]", 16, 8),
        ("ds_write_b128 v1, v[2:5]", 32, 16),
        ("ds_read_b128 v[2:5], v1", 16, 8),
        ("ds_read_b128 v[2:5], v1", 64, 32),
        ("ds_read_b128 v[2:5], v1", 80, 8),
        ("ds_read_b128 v[2:5], v1", 1024, 64),
    ],
)
def test_lanes_wait_for_those_that_meet_them_in_a_bank(instruction: str, nbytes: int, expected: float) -> None:
    assert cycles(apart(nbytes), instruction) == expected


def test_cdna_4_reads_from_64_banks() -> None:
    read = "ds_read_b128 v[2:5], v1"
    assert [cycles(apart(nbytes), read, on=MI355X) for nbytes in (16, 32, 1024)] == [4, 8, 64]
    assert cycles(apart(8), "ds_read_b64 v[2:3], v1", on=MI355X) == 2
    assert cycles(apart(16), "ds_write_b128 v1, v[2:5]", on=MI355X) == 8


def test_16_bytes_are_read_by_fours_of_lanes() -> None:
    """As an MFMA's 16 rows, and 16 bytes further of the same: neighbours meet nowhere where rows are an odd number of
    16 bytes apart, but fours of the one meet fours of the other."""

    def rows(nbytes: int, on: Target) -> float | None:
        lane = ["v_and_b32_e32 v2, 15, v0", "v_bfe_u32 v3, v0, 4, 2", "v_lshlrev_b32_e32 v3, 4, v3"]
        return cycles(*lane, f"v_mad_u32_u24 v1, v2, {nbytes}, v3", "ds_read_b128 v[4:7], v1", on=on)

    assert [rows(nbytes, MI300X) for nbytes in (272, 288)] == [16, 8]
    assert [rows(nbytes, MI355X) for nbytes in (272, 288)] == [8, 4]


def test_what_is_the_same_for_all_lanes_changes_no_bank() -> None:
    """An argument that is added, or a wave's own offset; but nothing is said where anything else is done with it."""
    lane = "v_and_b32_e32 v3, 63, v0"
    own = ["v_lshrrev_b32_e32 v2, 6, v0", "v_readfirstlane_b32 s4, v2", "s_lshl_b32 s4, s4, 12"]
    scaled = "v_lshlrev_b32_e32 v1, 3, v3"
    read = "ds_read_b32 v4, v1"
    assert cycles(lane, scaled, read) == 4
    assert cycles(lane, *own, scaled, "v_add_u32_e32 v1, s4, v1", read, waves=4) == 4
    assert cycles("s_load_dword s9, s[0:1], 0x10", lane, scaled, "v_add_u32_e32 v1, s9, v1", read) == 4
    assert cycles("s_load_dword s9, s[0:1], 0x10", lane, scaled, "v_xor_b32_e32 v1, s9, v1", read) is None
    assert cycles("s_load_dword s9, s[0:1], 0x10", lane, "v_lshlrev_b32_e32 v1, s9, v3", read) is None
    assert cycles("s_load_dword s9, s[0:1], 0x10", lane, "v_mul_u32_u24_e32 v1, s9, v3", read) is None
    assert cycles("global_load_dword v1, v[8:9], off", read) is None


@pytest.mark.parametrize(
    "made",
    [
        ["v_xor_b32_e32 v2, 4, v0", "v_and_b32_e32 v3, 8, v0", "v_lshl_or_b32 v1, v2, 4, v3"],
        ["v_bfe_u32 v2, v0, 3, 1", "v_cmp_eq_u32_e32 vcc, 1, v2", "v_mov_b32_e32 v3, 4", "v_mov_b32_e32 v4, 8",
         "v_cndmask_b32_e32 v1, v3, v4, vcc"],
        ["v_mov_b32_e32 v3, 56", "v_bitop3_b32 v1, v0, v3, v0 bitop3:0x48"],
    ],
    ids=["or", "choice", "table"],
)  # fmt: skip
def test_addresses_are_followed_through_bits(made: list[str]) -> None:
    """Two words of a bank, one of each, and one word for all lanes."""
    expected = {"v_lshl_or_b32": 4, "v_cndmask_b32": 2, "v_bitop3_b32": 2}
    found = cycles(*made, "ds_read_b32 v4, v1")
    assert found == next(cycles for name, cycles in expected.items() if made[-1].startswith(name))


def test_conflicts_keep_the_lds_busy() -> None:
    text = "ds_write_b32 v1, v2"
    listing = (
        f"     0  {apart(128)}\n     8  {text}\n    10  {MFMA}\n    18  s_cbranch_scc1 65000  -> 8\n    20  s_endpgm"
    )
    turn, unit = turn_of(listing), unit_of(MI300X)
    assert turn is not None
    assert unit is not None
    feed = Feed(64.0, 400)
    counted = simulate(turn, unit, waves=4, blocks=1, feed=feed, lds=cycles_of(parsed(listing), turn, unit, 4))
    assert counted.conflicts == pytest.approx(62 / 64)
    assert counted.cycles >= 4 * 64 > simulate(turn, unit, waves=4, blocks=1, feed=feed).cycles
    assert simulate(turn, unit, waves=4, blocks=1, feed=feed, lds={}).not_followed == 1


def loop(name: str, on: Target) -> Simulated:
    """Of the first kernel that has scores, or products of matrices."""
    try:
        compiler_version("hip")
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])
    plan = fusegen.plan(SHIPPED[name], on, tuned=False)
    steps = [getattr(step, "plan", step) for step in (plan.steps if isinstance(plan, ProgramPlan) else (plan,))]
    own = next(each for each in steps if isinstance(each, ScoresPlan | GemmPlan))
    return simulated(own, compiled(render(own)))


@needs_compiler
@pytest.mark.parametrize("on", [MI250X, MI300X, MI355X], ids=str)
@pytest.mark.parametrize(
    "name", ["qkv", "gemm_bias_relu_residual", "grouped_weight_grad", "rmsnorm_gemm_swiglu", "decoder_layer",
             "qk_causal_softmax", "i8_gemm", "gemm_tf32"]
)  # fmt: skip
def test_no_lanes_of_products_meet_in_a_bank(name: str, on: Target) -> None:
    found = loop(name, on)
    assert (found.conflicts, found.not_followed) == (0, 0)


@needs_compiler
@pytest.mark.parametrize("on", [MI250X, MI300X, MI355X], ids=str)
@pytest.mark.parametrize("name", ["attention", "causal_attention", "decode_attention", "sink_attention"])
def test_no_lanes_of_attention_meet_in_a_bank(name: str, on: Target) -> None:
    """Values stored one by one met by sixteens, and rows that are read by fours by twos: 83 % of the LDS's cycles."""
    found = loop(name, on)
    assert (found.conflicts, found.not_followed) == (0, 0)
