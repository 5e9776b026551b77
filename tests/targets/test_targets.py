"""Target names and facts, and that the spellings mean what they say in the code that hiprtc makes."""

from __future__ import annotations

import re

import pytest

from fusegen.compiling import compile_source, compiler_version, disassemble
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError, RequestError
from fusegen.language.reference import draws
from fusegen.language.spec import Chain
from fusegen.language.types import DTYPES, bf16, f16
from fusegen.pipeline import plan
from fusegen.planner.model import RowPlan
from fusegen.runtime.cache import compiled
from fusegen.targets import GOLDEN_TARGETS, H200, MI300X, NAMES, TARGETS, Target, target
from tests.specs import ROWS


@pytest.mark.parametrize("name", NAMES)
def test_every_name_gives_a_target_that_its_own_name_gives_back(name: str) -> None:
    assert target(target(name).name) == target(name)


@pytest.mark.parametrize(
    ("name", "model", "arch"),
    [
        ("cuda", "h200", "sm_90a"),
        ("cuda:h200", "h200", "sm_90a"),
        ("cuda:sm_90", "sm_90", "sm_90"),
        ("cuda:sm_80", "a100", "sm_80"),
        ("CUDA:H100 ", "h100", "sm_90a"),
        ("hip", "mi300x", "gfx942"),
        ("hip:gfx90a", "mi250x", "gfx90a"),
        ("hip:gfx942", "mi300x", "gfx942"),
        ("hip:gfx950", "mi355x", "gfx950"),
        ("hip:mi350x", "mi350x", "gfx950"),
        ("hip:gfx1100", "rx7900xtx", "gfx1100"),
        ("hip:gfx1201", "rx9070xt", "gfx1201"),
        ("hip:R9700", "r9700", "gfx1201"),
    ],
)
def test_names_stand_for_models_and_architectures(name: str, model: str, arch: str) -> None:
    assert (target(name).model, target(name).arch) == (model, arch)


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("h200", "cuda:h200"),
        ("cuda:h20", "cuda:h200"),
        ("cuda:mi300x", "hip:mi300x"),
        ("hip:gfx943", "hip:gfx942"),
        ("rx7900xtx", "hip:rx7900xtx"),
        ("hip:gfx1101", "hip:gfx1100"),
    ],
)
def test_unknown_name_is_answered_with_a_guess_and_the_list(name: str, guess: str) -> None:
    with pytest.raises(RequestError, match=rf"did you mean .*{guess}[\s\S]*mi300x") as error:
        target(name)
    assert str(error.value).startswith(f"{name!r} is not a target\n")


def test_a_name_like_no_other_is_answered_without_a_guess() -> None:
    with pytest.raises(RequestError) as error:
        target("tpu")
    assert "did you mean" not in str(error.value)
    assert "h200" in str(error.value)


@pytest.mark.parametrize("t", TARGETS.values(), ids=str)
def test_facts_agree_with_each_other(t: Target) -> None:
    assert TARGETS[t.name] is t
    assert t.shared_bytes + t.shared_reserved <= t.shared_per_sm
    assert t.threads_per_block % t.warp == 0
    assert t.threads_per_sm % (t.warp * t.schedulers_per_sm) == 0
    assert t.registers_per_sm % (t.schedulers_per_sm * t.warp * t.register_unit) == 0
    assert t.max_grid_threads >= t.max_grid
    for table in (t.spelling.ctype, t.spelling.to_value, t.spelling.to_storage):
        assert set(table) == set(DTYPES.values())


def test_golden_targets_are_of_both_vendors() -> None:
    assert {H200, MI300X} <= set(GOLDEN_TARGETS)


# clang leaves the loops of a row that draws random numbers rolled, with arrays in memory: the gate takes another tile
STEADY = [chain for chain in ROWS.values() if not draws(chain.graph)]
CONVERSIONS = r"""
extern "C" __global__ void narrow(const float* x, {half}* h, {bfloat}* b) {{
  int i = threadIdx.x;
  h[i] = {to_half};
  b[i] = {to_bfloat};
}}
extern "C" __global__ void widen(const {half}* h, const {bfloat}* b, float* x, float* y) {{
  int i = threadIdx.x;
  x[i] = {from_half};
  y[i] = {from_bfloat};
}}
"""


@pytest.mark.parametrize("name", ["hip:gfx90a", "hip:gfx942", "hip:gfx950", "hip:gfx1100", "hip:gfx1201"])
def test_casts_of_clang_round_to_nearest_even_and_keep_nan(name: str) -> None:
    try:
        compiler_version("hip")
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])
    t = target(name)
    s = t.spelling
    text = CONVERSIONS.format(
        half=s.ctype[f16],
        bfloat=s.ctype[bf16],
        to_half=s.to_storage[f16].format("x[i]"),
        to_bfloat=s.to_storage[bf16].format("x[i]"),
        from_half=s.to_value[f16].format("h[i]"),
        from_bfloat=s.to_value[bf16].format("b[i]"),
    )
    narrow = disassemble(compile_source(text, "narrow", t, filename="casts.hip", threads=64))
    assert "s_setreg" not in narrow  # the rounding mode stays what it is at kernel start: to nearest even
    assert len(re.findall(r"v_cvt_f16_f32", narrow)) == 1
    if t.arch == "gfx950":
        assert len(re.findall(r"v_cvt_pk_bf16_f32", narrow)) == 1
        assert "0x7fff" not in narrow
    else:
        assert "0x7fff" in narrow  # bfloat16: half of the last place, less one,
        assert re.search(r"v_bfe_u32 .*, 16, 1", narrow)  # and the lowest bit that is kept
        assert "v_cmp_u_f32" in narrow  # NaN goes another way,
        assert re.search(r"v_or_b32.* 0x400000", narrow)  # and is made quiet: truncation can't make it infinite
    widen = disassemble(compile_source(text, "widen", t, filename="casts.hip", threads=64))
    assert "v_cvt_f32_f16" in widen
    assert re.search(r"v_lshlrev_b32.* 16, ", widen)


@pytest.mark.by_values("chain", "name")
@pytest.mark.parametrize("name", ["hip:gfx90a", "hip:gfx942"])
@pytest.mark.parametrize("chain", STEADY, ids=lambda chain: chain.name)
def test_kernels_for_amd_move_16_bytes_an_instruction_and_leave_room_for_waves(chain: Chain, name: str) -> None:
    """What can be said of speed without an AMD GPU: the compiler's account of each shipped kernel."""
    try:
        compiler_version("hip")
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])
    source = render(plan(chain.graph, target(name)))
    made = source.plan
    binary = compiled(source)
    need, code = binary.resources, disassemble(binary)
    assert not need.spill_bytes
    assert not need.stack_bytes
    assert binary.occupancy is not None
    assert binary.occupancy.fraction >= 0.25, "at least two waves a SIMD, so that one loads while another computes"
    for access in made.accesses:
        if access.mode == "vector" and access.vector_bytes == 16:
            assert f"global_{'store' if access.output else 'load'}_dwordx4" in code
        if access.evict_first:
            assert re.search(r"global_load_dwordx4 .* (nt|glc slc)", code), "leaves the caches first"
    assert isinstance(made, RowPlan)
    if any(
        call in s.op.expr for row_pass in made.passes for s in row_pass.body for call in ("exponential(", "power_of_2(")
    ):
        assert "v_exp_f32" in code
