"""RDNA 3 and RDNA 4, whose waves have 32 lanes: their facts in machine code, kernels that are right, and bugs found."""

from __future__ import annotations

import re

import pytest

import fusegen
from fusegen.compiling import compiler_version, disassemble
from fusegen.compiling.resources import metadata
from fusegen.emitting.rendering import render
from fusegen.errors import MissingError
from fusegen.pipeline import plan
from fusegen.runtime.cache import compiled
from fusegen.targets import target
from tests.attention_mutations import AttentionSubject
from tests.gemm_mutations import GemmSubject
from tests.mutations import Mutation, Subject
from tests.rdna_mutations import ATTENTION, ATTENTION_MUTATIONS, MUTATIONS, PRODUCT_MUTATIONS, PRODUCTS, SUBJECTS
from tests.specs import SHIPPED
from tests.targets.test_amd_code import machine_code, main_loop, most_in_flight, multiplies, products_behind_loads
from tests.validation.test_mutations import caught_by, kernel_of, report_on

RDNA = ("hip:gfx1100", "hip:gfx1201")
KERNELS = (*SUBJECTS, *PRODUCTS, *ATTENTION)
# each by another kind of kernel: rows, columns, running sums, choices, a counting sort, and a program of several
SOME = (
    ("rmsnorm", "hip:gfx1201"), ("layernorm_param_grads", "hip:gfx1100"), ("router_topk", "hip:gfx1201"),
    ("top_p_sample", "hip:gfx1100"), ("moe_router_deepseek", "hip:gfx1100"), ("rmsnorm_backward", "hip:gfx1201"),
)  # fmt: skip


@pytest.fixture(scope="module")
def hiprtc() -> None:
    """Skips what needs hiprtc where there is none."""
    try:
        compiler_version("hip")
    except MissingError as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.usefixtures("hiprtc")
@pytest.mark.parametrize(("name", "gpu"), SOME)
def test_kernels_of_rows_are_right_and_pass_the_gate(name: str, gpu: str) -> None:
    """As every shipped spec without products was, once, on both: of some of each kind here."""
    fusegen.compile(SHIPPED[name], gpu, on="emulator")


@pytest.mark.usefixtures("hiprtc")
@pytest.mark.parametrize("gpu", RDNA)
def test_a_wave_has_32_lanes(gpu: str) -> None:
    """By the note that the HIP runtime launches by; and a row's sum needs no way through the LDS within a wave."""
    binary = compiled(render(plan(SHIPPED["rmsnorm"].graph, target(gpu))))
    (kernel,) = metadata(binary.code)["amdhsa.kernels"]
    assert kernel[".wavefront_size"] == 32 == target(gpu).warp
    code = [line.split(maxsplit=1)[1].split()[0] for line in disassemble(binary).splitlines()]
    assert code.count("v_add_f32_dpp") >= 3
    assert code.count("v_permlanex16_b32") == 1
    assert not {"ds_swizzle_b32", "ds_bpermute_b32"} & set(code)
    assert binary.resources.spill_bytes == binary.resources.stack_bytes == 0
    assert binary.occupancy is not None
    assert binary.occupancy.fraction >= 0.5, "of 16 waves a SIMD"


@pytest.mark.usefixtures("hiprtc")
@pytest.mark.parametrize("gpu", RDNA)
def test_loads_of_a_masked_row_are_in_flight_together(gpu: str) -> None:
    code = machine_code(SHIPPED["scale_causal_softmax"].graph, gpu)
    loads = sum(line.startswith("global_load_b128") for line in code)
    assert loads >= 4
    assert most_in_flight(code) == loads


@pytest.mark.usefixtures("hiprtc")
def test_maxima_that_keep_a_nan_are_one_instruction_on_gfx12() -> None:
    code = [line.split()[0] for line in machine_code(SHIPPED["scale_softmax"].graph, "hip:gfx1201")]
    assert sum(bool(re.match(r"v_maximum3?_f32", word)) for word in code) >= 8
    assert not any(word.startswith("v_cmp_u_f32") for word in code)


@pytest.mark.usefixtures("hiprtc")
@pytest.mark.parametrize("gpu", RDNA)
def test_slices_of_factors_are_on_their_way_while_one_is_multiplied(gpu: str) -> None:
    """A wave has 64 x 32 sums of a tile of 128 x 128: 16 instructions for a slice of 32, and no register in memory."""
    graph = SHIPPED["gemm_bias_gelu"].graph
    assert compiled(render(plan(graph, target(gpu)))).resources.stack_bytes == 0
    loop = main_loop(graph, gpu)
    words = [line.split()[0] for line in loop if multiplies(line)]
    assert words == ["v_wmma_f32_16x16x16_bf16"] * 16
    assert products_behind_loads(loop) >= 14


@pytest.mark.parametrize("subject", KERNELS, ids=lambda s: f"{s.chain}-{s.target}-{dict(getattr(s, 'sizes', ()))}")
def test_unbroken_kernels_pass(subject: Subject | GemmSubject | AttentionSubject) -> None:
    fusegen.validate(kernel_of(subject, lambda text: text), quick=True).raise_for_error()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "mutation", [*MUTATIONS, *PRODUCT_MUTATIONS, *ATTENTION_MUTATIONS], ids=lambda m: m.name.replace(" ", "-")
)
def test_broken_kernels_are_caught(mutation: Mutation) -> None:
    assert caught_by(report_on(mutation)) != "SURVIVED", mutation.models
