"""Loops of a compute unit of CDNA, simulated: what hand-written ones take, and which loop of a kernel it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusegen.measuring.machine_loops import Instruction, Turn, parsed, turn_of
from fusegen.measuring.simulation import BRANCH_CYCLES, Feed, Simulated, simulate
from fusegen.targets import MI250X, MI300X, MI355X, Target, target
from fusegen.targets.compute_unit import PASS_CYCLES, RESULT_PASSES, clock_ghz, unit_of

UNIT = unit_of(MI300X)
assert UNIT is not None
LATENCY = 400
FEED = Feed(64.0, LATENCY)
MFMA = "v_mfma_f32_32x32x8_bf16"
MFMA_CYCLES = 32


def listing(*texts: str) -> str:
    """Of a kernel, each instruction 8 bytes long, as the disassembler writes it."""
    return "\n".join(f"{place * 8:6x}  {text}" for place, text in enumerate(texts))


def loop(*texts: str) -> Turn:
    """The turn of a loop around them."""
    code = parsed(listing(*texts, "s_cbranch_scc1 65000  -> 0"))
    assert len(code) == len(texts) + 1
    return Turn(0, code[-1].at, code)


def run(*texts: str, waves: int = 1, blocks: int = 1, feed: Feed = FEED) -> Simulated:
    assert UNIT is not None
    return simulate(loop(*texts), UNIT, waves=waves, blocks=blocks, feed=feed)


def product(sums: int, left: int = 100, right: int = 102) -> str:
    own = f"v[{sums}:{sums + 15}]"
    return f"{MFMA} {own}, v[{left}:{left + 1}], v[{right}:{right + 1}], {own}"


# ---------------------------------------------------------------- the matrix unit


def test_independent_products_take_their_passes() -> None:
    found = run(product(0), product(16))
    assert found.cycles == 2 * MFMA_CYCLES
    assert found.busy["matrix"] == 0.25  # one SIMD of four
    assert found.bound == "matrix"


def test_products_that_add_to_the_same_sums_follow_each_other_at_once() -> None:
    assert run(product(0), product(0)).cycles == 2 * MFMA_CYCLES


def test_what_takes_sums_as_a_factor_waits_for_them() -> None:
    found = run(product(0, left=16), product(16, left=0))
    assert found.cycles == 2 * (MFMA_CYCLES + RESULT_PASSES * PASS_CYCLES)
    assert found.waiting["sums of the matrix unit"] > 0.5
    assert run(product(0), "v_add_f32_e32 v90, v91, v15").cycles > run(product(0), "v_add_f32_e32 v90, v91, v16").cycles


def test_other_instructions_go_beside_products() -> None:
    beside = [f"v_add_f32_e32 v{90 + i}, v{80 + i}, v{81 + i}" for i in range(3)]
    assert run(product(0), *beside).cycles == MFMA_CYCLES
    assert run(product(0), *beside, waves=4).cycles == MFMA_CYCLES
    alone = "v_mfma_f32_32x32x2_f32 v[0:15], v100, v102, v[0:15]"  # which leaves the vector unit nothing, on gfx942
    assert run(alone, *beside).cycles >= 64 + 3 * PASS_CYCLES


def test_waves_of_one_simd_share_its_matrix_unit() -> None:
    assert run(product(0), waves=4).cycles == MFMA_CYCLES
    found = run(product(0), waves=8)
    assert found.cycles == 2 * MFMA_CYCLES
    assert found.busy["matrix"] == 1.0


@pytest.mark.parametrize("on", [MI250X, MI300X, MI355X], ids=str)
def test_passes_of_products_are_the_data_sheets_rate(on: Target) -> None:
    unit = unit_of(on)
    assert unit is not None
    atoms = [atom for atom in on.atoms if atom.kind == "mfma"]
    assert len(atoms) >= 8
    for atom in atoms:
        cycles = unit.matrix_cycles(atom.instruction.replace("__builtin_amdgcn", "v"))
        flops = 2 * atom.rows * atom.cols * atom.k // atom.instructions
        tflops = flops / cycles * unit.simds * on.sms * clock_ghz(on) / 1e3
        assert tflops == pytest.approx(on.product_tflops(atom.factors), rel=2e-3), atom.instruction


def test_a_product_of_unknown_passes_is_refused() -> None:
    with pytest.raises(LookupError, match="v_mfma_f32_4x4x4_16b_f16 is no MFMA of one block"):
        run("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], v[0:3]")


# ---------------------------------------------------------------- memory, the LDS, waits


def test_a_wait_for_a_load_takes_its_latency() -> None:
    found = run("global_load_dwordx4 v[0:3], v[8:9], off", "s_waitcnt vmcnt(0)")
    assert LATENCY + 16 <= found.cycles <= LATENCY + 16 + 2 * PASS_CYCLES + BRANCH_CYCLES
    assert found.waiting["loads from memory"] > 0.9
    ahead = run("s_waitcnt vmcnt(1)", "global_load_dwordx4 v[0:3], v[8:9], off")  # two on their way
    assert ahead.cycles == pytest.approx(found.cycles / 2, rel=0.1)


def test_loads_come_at_the_rate_they_are_fed() -> None:
    loads = [f"global_load_dwordx4 v[{4 * i}:{4 * i + 3}], v[90:91], off" for i in range(8)]
    found = run(*loads, "s_waitcnt vmcnt(8)", waves=8, feed=Feed(8.0, LATENCY))
    assert found.cycles == pytest.approx(8 * 8 * 1024 / 8.0, rel=0.01)
    assert found.busy["memory"] == pytest.approx(1.0, abs=0.01)
    assert found.bound == "memory"


def test_the_lds_gives_128_bytes_a_cycle_to_all_waves() -> None:
    reads = [f"ds_read_b128 v[{4 * i}:{4 * i + 3}], v90 offset:{16 * i}" for i in range(8)]
    found = run(*reads, "s_waitcnt lgkmcnt(4)", waves=8)
    assert found.cycles == pytest.approx(8 * 8 * 8, rel=0.02)
    assert found.bound == "LDS"
    halves = [f"ds_write_b16 v90, v{i}" for i in range(8)]
    assert run(*halves, "s_waitcnt lgkmcnt(4)", waves=8).cycles == pytest.approx(8 * 8 * 2, rel=0.05)
    alone = run(reads[0], "s_waitcnt lgkmcnt(0)")
    assert 64 + 8 <= alone.cycles <= 64 + 8 + 3 * PASS_CYCLES + BRANCH_CYCLES
    assert alone.waiting["the LDS"] > 0.5


def test_cdna_4_reads_twice_as_fast() -> None:
    unit = unit_of(MI355X)
    assert unit is not None
    turn = loop("ds_read_b128 v[0:3], v90", "ds_read_b128 v[4:7], v90", "s_waitcnt lgkmcnt(2)")
    assert simulate(turn, unit, waves=16, blocks=1, feed=FEED).cycles == pytest.approx(2 * 16 * 4, rel=0.05)


def test_quarter_rate_instructions_hold_the_vector_unit() -> None:
    assert run("v_exp_f32_e32 v0, v1", "v_exp_f32_e32 v2, v3", waves=8).cycles == 2 * 2 * 16


def test_waves_of_a_block_meet_at_a_barrier() -> None:
    """The fifth wave shares a SIMD with the first; the others wait for both."""
    met = run(product(0), "s_barrier", waves=5)
    assert met.cycles >= 2 * MFMA_CYCLES
    assert met.waiting["other waves at a barrier"] > 0.25
    assert "other waves at a barrier" not in run(product(0), waves=5).waiting


def test_a_pause_is_taken() -> None:
    add = "v_add_f32_e32 v0, v1, v2"
    assert run("s_nop 15", add).cycles == run(add).cycles + 16 * PASS_CYCLES


# ---------------------------------------------------------------- which loop, which way


def test_what_instructions_read_write_and_move() -> None:
    sums = Instruction(0, product(16))
    assert sums.sums == sums.writes == tuple(f"v{i}" for i in range(16, 32))
    assert sums.reads == ("v100", "v101", "v102", "v103")
    store = Instruction(0, "ds_write_b128 v94, v[78:81] offset:4096")
    assert (store.writes, store.reads, store.bytes) == ((), ("v94", "v78", "v79", "v80", "v81"), 1024)
    load = Instruction(0, "global_load_ushort v5, v[6:7], off")
    assert (load.writes, load.reads, load.bytes) == (("v5",), ("v6", "v7"), 128)
    assert Instruction(0, "ds_read2st64_b64 v[0:3], v9 offset1:8").lane_bytes == 16
    assert Instruction(0, "v_accvgpr_read_b32 v0, a3").reads == ("a3",)
    assert Instruction(0, "s_waitcnt vmcnt(2) lgkmcnt(0)").waits == {"vmcnt": 2, "lgkmcnt": 0}


def test_the_loop_with_the_most_products_counts_and_the_way_with_the_most_work() -> None:
    code = listing(
        "v_mov_b32_e32 v0, 0",
        "global_load_dwordx4 v[0:3], v[8:9], off",  # 8: a loop without products
        "s_cbranch_scc1 1  -> 8",
        product(0),  # 18: the loop that counts
        "s_cbranch_execz 2  -> 38",  # skips what has to be done
        product(16),
        "s_branch 3  -> 40",
        "v_mov_b32_e32 v1, 0",  # 38
        "s_cbranch_scc1 3  -> 58",  # 40: at the last turn
        "global_load_dwordx4 v[4:7], v[8:9], off",
        "s_branch 3  -> 18",
        "s_endpgm",
    )
    found = turn_of(code)
    assert found is not None
    assert (found.start, found.products) == (0x18, 2)
    assert [one.at for one in found.instructions] == [0x18, 0x20, 0x28, 0x30, 0x40, 0x48, 0x50]
    assert turn_of(listing("v_mov_b32_e32 v0, 0", "s_endpgm")) is None
    assert turn_of("") is None


def test_lanes_of_a_wave_take_one_side_of_a_test() -> None:
    """That which moves more, in whichever order they lie."""

    def sides(first: str, second: str) -> list[int]:
        found = turn_of(
            listing(
                "s_and_saveexec_b64 s[2:3], s[0:1]",
                "s_xor_b64 s[2:3], exec, s[2:3]",
                "s_cbranch_execz 2  -> 28",
                first,  # 18
                "s_waitcnt vmcnt(0)",
                "s_andn2_saveexec_b64 s[0:1], s[2:3]",  # 28
                "s_cbranch_execz 1  -> 40",
                second,  # 38
                "s_or_b64 exec, exec, s[0:1]",  # 40
                product(0),
                "s_cbranch_scc1 65000  -> 0",
                "s_endpgm",
            )
        )
        assert found is not None
        return [one.at for one in found.instructions]

    one, four = "global_load_ushort v4, v[8:9], off", "global_load_dwordx2 v[4:5], v[8:9], off"
    behind = [0x40, 0x48, 0x50]
    assert sides(one, four) == [0, 8, 0x10, 0x28, 0x30, 0x38, *behind]
    assert sides(four, one) == [0, 8, 0x10, 0x18, 0x20, 0x28, 0x30, *behind]


def test_of_two_ways_to_bring_the_same_a_turn_takes_the_shorter_one() -> None:
    """And of two without loads the longer one, where one only leaves something out."""

    def ways(load: str) -> list[int]:
        found = turn_of(
            listing(
                product(0),
                "s_cbranch_scc0 4  -> 28",
                load,  # 10
                "v_mov_b32_e32 v1, 0",
                "s_branch 2  -> 30",
                load,  # 28
                "s_cbranch_scc1 65000  -> 0",  # 30
                "s_endpgm",
            )
        )
        assert found is not None
        return [one.at for one in found.instructions]

    assert ways("global_load_dword v4, v[8:9], off") == [0, 8, 0x28, 0x30]
    assert ways("v_mov_b32_e32 v2, 0") == [0, 8, 0x10, 0x18, 0x20, 0x30]


def test_a_loop_within_is_gone_through_once() -> None:
    code = listing(
        "v_mov_b32_e32 v0, 0",
        "ds_read_b32 v1, v2",  # 8: within
        "s_cbranch_scc1 1  -> 8",
        product(0),
        "s_cbranch_vccnz 1  -> 0",
        "s_endpgm",
    )
    found = turn_of(code)
    assert found is not None
    assert [one.at for one in found.instructions] == [0, 8, 0x10, 0x18, 0x20]


def test_only_cdna_is_known() -> None:
    assert unit_of(target("hip:gfx1100")) is None
    assert unit_of(target("cuda:h200")) is None
    half = unit_of(replace(MI300X, sms=152, dies=4, fp32_tflops=MI300X.fp32_tflops / 2))
    assert half is not None
    assert UNIT is not None
    assert (half.l2_bytes, half.ghz) == (UNIT.l2_bytes, UNIT.ghz)
    assert UNIT.ghz == pytest.approx(2.1, rel=1e-3)
