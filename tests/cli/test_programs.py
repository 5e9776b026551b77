"""What the verbs say of chains that several kernels hold."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fusegen
from fusegen.cli import app, programs
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.language.spec import Chain
from fusegen.planner.programs.model import ProgramPlan
from fusegen.targets import H200
from tests.chains_cut import CHAINS, lora, mlp
from tests.cli.test_widths import Fits, fits, words
from tests.tools import needs_both

ROOT = Path(__file__).resolve().parents[2]
SPEC = str(ROOT / "tests/chains_cut.py")
LARGE = [word for dim in "MNK" for word in ("--set", f"{dim}=4096")]
__all__ = ["fits"]


def run(*given: str) -> Result:
    return CliRunner().invoke(app, [*given, "--target", "cuda:h200"])


def document(*given: str) -> Any:
    result = run(*given, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def program_of(chain: Chain) -> ProgramPlan:
    found = programs.program_of(chain, H200)
    assert found is not None
    return found


@pytest.mark.parametrize("spec", CHAINS, ids=lambda c: c.name)
def test_plan_and_explain_fit(fits: Fits, spec: Chain) -> None:
    program = program_of(spec)
    text = words(fits(functools.partial(programs.show_program, program, every=True)))
    assert all(f"{number}. {step.name}" in text for number, step in programs.numbered(program))
    assert all(f"{cut.time_us:.1f} us" in text for cut in program.cuts if cut.time_us is not None)
    said = words(fits(functools.partial(programs.show_explanation, program)))
    assert all(stored.why.split()[-1] in said for stored in program.boundaries)
    assert f"kernel {len(program.steps)} of {len(program.steps)}:" in said


def test_plan_has_steps_boundaries_and_cuts() -> None:
    (facts,) = document("plan", f"{SPEC}:lora", "--all")["plans"]
    program = program_of(lora)
    assert [step["kernel"] for step in facts["steps"]] == [step.name for step in program.steps]
    assert facts["workspace_bytes"] == program.arena(lora.graph.sizes).bytes
    by_name = {fact["name"]: fact for fact in facts["boundaries"]}
    assert by_name["x_times_a"]["shape"] == ["M", "R"]
    assert by_name["x_times_a"]["bytes"] == 24 * 16 * 2
    assert by_name["x_times_a"]["offset"] % 256 == 0
    assert by_name["x_times_a"]["why"]
    assert [cut["taken"] for cut in facts["cuts"]].count(True) == 1
    assert facts["launches"] == {"fused": len(program.steps), "unfused": 5}
    (facts,) = document("plan", f"{SPEC}:residual_norm", *LARGE)["plans"]
    (fact,) = facts["boundaries"]
    assert (fact["name"], fact["home"], fact["offset"]) == ("h", "output", None)
    assert (fact["written_by"], fact["read_by"]) == (0, [1])


def test_pipeline_plan_is_the_programs() -> None:
    planned = fusegen.plan(mlp, "cuda:h200")
    assert isinstance(planned, ProgramPlan)
    assert [step.name for step in planned.steps] == ["mlp_h", "mlp_out"]


def test_explain_says_why_each_boundary_is_there() -> None:
    (facts,) = document("explain", f"{SPEC}:mlp")["explanations"]
    (point,) = facts["sections"]["between kernels"]
    assert "h bf16[M, H], 4.5 KiB, written by mlp_h, read by mlp_out: the product at line " in point["text"]
    assert [kernel["kernel"] for kernel in facts["kernels"]] == ["mlp_h", "mlp_out"]
    assert all("why this regime" in kernel["sections"] for kernel in facts["kernels"])


def test_inspect_shows_each_kernel() -> None:
    text = run("inspect", f"{SPEC}:mlp").stdout
    assert text.index("// mlp_h  ") < text.index("// mlp_out  ")
    kernels = document("inspect", f"{SPEC}:mlp")["kernels"]
    assert [kernel["kernel"] for kernel in kernels] == ["mlp_h", "mlp_out"]
    assert run("inspect", f"{SPEC}:mlp", "--what", "reference").stdout == program_of(mlp).reference
    assert "1. mlp_h" in run("inspect", f"{SPEC}:mlp", "--what", "plan").stdout
    text = run("inspect", f"{SPEC}:lora", "--what", "profile", "--set", "K=128").stdout
    launch = ":lora --target cuda:h200 --set M=24 --set K=128 --set N=96 --set R=16"
    assert text.count(launch) == 6, "of the second kernel, too, which has no K"


@needs_both
def test_compile_has_a_row_for_each_kernel() -> None:
    result = run("compile", f"{SPEC}:mlp", f"{SPEC}:lora", "--no-validate")
    assert result.exit_code == 0, result.output
    rows = [line.split()[0] for line in result.stdout.splitlines()[1:7]]
    assert rows == ["ok", "mlp_h", "mlp_out", "ok", "lora_x_times_w", "lora_out"]
    (facts,) = document("compile", f"{SPEC}:mlp", "--no-validate")["kernels"]
    assert [step["kernel"] for step in facts["steps"]] == ["mlp_h", "mlp_out"]
    assert all(step["resources"]["spill_bytes"] == 0 for step in facts["steps"])


def test_validate_and_launch() -> None:
    try:
        compiler()
    except EmulatorUnavailable as error:
        pytest.skip(f"no emulator: {str(error).splitlines()[0]}")
    result = run("validate", f"{SPEC}:residual_norm", "--quick", "--on", "emulator")
    assert result.exit_code == 0, result.output
    result = run("launch", f"{SPEC}:mlp", "--on", "emulator", "--launches", "2")
    assert "mlp: 2 launches on emulator" in result.stdout


def test_what_is_of_one_kernel_alone() -> None:
    result = run("validate", f"{SPEC}:mlp", "--lengths", "--on", "emulator")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "--lengths is for the row lengths of one kernel, and mlp on cuda:h200 is a program of 2 kernels: mlp_h"
    )
    assert [graph.name for graph in programs.kernel_graphs(mlp, H200)] == ["mlp_h", "mlp_out"]
    assert programs.kernel_graphs(mlp.at(M=24), H200)[0].sizes["M"] == 24


def test_how_kernels_are_launched_is_said_and_can_be_left(tmp_path: Path) -> None:
    said = " ".join(run("plan", f"{SPEC}:mlp").stdout.split())
    assert "waits for them behind the first 2 slices of down" in said
    facts = document("plan", f"{SPEC}:mlp")["plans"][0]["steps"]
    assert [step["launch"] for step in facts] == [
        {"waits": False, "triggers": True, "before_wait": ""},
        {"waits": True, "triggers": False, "before_wait": "the first 2 slices of down"},
    ]
    assert "less than one kernel behind the other's end" in " ".join(run("explain", f"{SPEC}:mlp").stdout.split())
    source = run("inspect", f"{SPEC}:mlp").stdout
    assert "griddepcontrol.wait" in source
    apart = run("--no-dependent-launch", "inspect", f"{SPEC}:mlp").stdout
    assert "mlp_out" in apart
    assert "griddepcontrol" not in apart
    assert run("inspect", f"{SPEC}:mlp").stdout == source, "asked anew each time"
