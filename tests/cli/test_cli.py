"""The command line: what each verb says, its JSON, its exit codes, and how it behaves in a pipe."""

from __future__ import annotations

import errno
import json
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fusegen
from fusegen.cli import app, asking, showing
from fusegen.emitting import golden
from fusegen.emitting.rendering import render
from fusegen.emulator import EmulatorUnavailable
from fusegen.errors import CompileError, MissingError, RequestError
from fusegen.language.spec import load_chains
from fusegen.planner.model import Plan, Source
from fusegen.targets import H200, MI300X
from tests.tools import needs_compiler

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "fusegen")
SPEC = '''
from fusegen import chain, dims, f16, f32
from fusegen import ops as F

M, N = dims("M N")


@chain(M=8, N=64)
def scaled(x: f16[M, N], bias: f16[N], scale: f32) -> f16[M, N]:
    """relu(x + bias) * scale."""
    return F.relu(x + bias) * scale


@chain(M=8, N=64)
def normed(x: f16[M, N]) -> f16[M, N]:
    """softmax(x)."""
    return F.softmax(x)
'''


Run = Callable[..., Result]


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels of these tests, apart from the user's."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caches: Path) -> Run:
    """`run("plan", "chains.py:scaled")` in a folder that has chains.py."""
    (tmp_path / "chains.py").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(caches))
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def document(result: Result, code: int = 0) -> Any:
    """The JSON on stdout, which holds nothing else."""
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def error_of(result: Result, code: int) -> str:
    """The message on stderr; stdout is empty, and nobody sees a traceback."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.stderr


# ---------------------------------------------------------------- list


def test_list(run: Run) -> None:
    text = run("list", ".").stdout.splitlines()
    assert " ".join(text[1].split()) == "scaled f16[M, N], f16[N], f32 -> f16[M, N] M=8 N=64 chains.py"
    facts = document(run("list", "chains.py:scaled", "--json"))["chains"]
    assert facts == [
        {
            "name": "scaled",
            "doc": "relu(x + bias) * scale.",
            "file": "chains.py",
            "line": 8,
            "signature": "f16[M, N], f16[N], f32 -> f16[M, N]",
            "inputs": [
                {"name": "x", "dtype": "f16", "shape": ["M", "N"]},
                {"name": "bias", "dtype": "f16", "shape": ["N"]},
                {"name": "scale", "dtype": "f32", "shape": []},
            ],
            "outputs": [{"name": "out", "dtype": "f16", "shape": ["M", "N"]}],
            "sizes": {"M": 8, "N": 64},
        }
    ]


def test_list_ops_shows_every_op(run: Run) -> None:
    facts = document(run("list", "--ops", "--json"))["ops"]
    calls = [fact["call"] for fact in facts]
    for name in fusegen.ops.FUNCTIONS:
        assert any(call.startswith(f"F.{name}(") for call in calls), name
    assert {"x + y", "~x", "x <= y"} <= set(calls)
    assert all(fact["doc"] for fact in facts)
    text = run("list", "--ops").stdout
    assert "condition ? x : y" in text
    assert "{" not in text, "what stands for an argument is its name"
    assert all(call.split(", ")[0] in text for call in calls), "a long one goes on in the next line"


def test_list_needs_a_folder_to_look_in(run: Run) -> None:
    assert "no folder `specs` here" in error_of(run("list"), 2)


# ---------------------------------------------------------------- plan and explain


def test_plan_reports_the_missions_bytes() -> None:
    """26 -> 12 B an element, 416 -> 192 MiB at S = H = 4096, ideally 96 MiB; one launch for four."""
    words = ["plan", str(ROOT / "specs/bias_gelu_residual_ln.py"), "--target", "cuda:h200", "--set", "M=4096"]
    (facts,) = document(CliRunner().invoke(app, [*words, "--json"]))["plans"]
    counted = facts["bytes"]
    assert (counted["per_element_unfused_each"], counted["per_element_fused_each"]) == (26, 12)
    assert (counted["per_element_unfused"], counted["per_element_fused"]) == (416 * 2**20, 192 * 2**20)
    assert counted["ideal"] == counted["moved"] == 96 * 2**20 + 3 * 8192
    assert facts["launches"] == {"fused": 1, "unfused": 4}
    text = CliRunner().invoke(app, words).stdout
    line = next(line for line in text.splitlines() if line.startswith("per element"))
    assert " ".join(line.split()).endswith("26 B 416.0 MiB 12 B 192.0 MiB 2.17x")
    assert "96.0 MiB" in text
    assert "1 fused, 4 unfused" in text


def test_plan_shows_the_header_tensors_and_candidates(run: Run) -> None:
    text = run("plan", "chains.py:normed", "--target", "hip:mi300x", "--all").stdout
    assert text.startswith("normed  f16[M, N] -> f16[M, N]  at M=8 N=64\n")
    for word in ("target ", "tile ", "floor ", "read x", "write out", "x_stride", "estimate", "\n* "):
        assert word in text
    assert "- elementwise: " in text  # the rule that refused, with its reason


def test_plan_json_keys(run: Run) -> None:
    (facts,) = document(run("plan", "chains.py:scaled", "--target", "cuda", "--all", "--json"))["plans"]
    assert set(facts) == {
        "chain", "signature", "sizes", "target", "arch", "bytes", "tensors", "accesses", "flops", "special_calls",
        "product_flops",
        "intensity", "launches", "rounding", "decisions", "rule", "regime", "staging", "tile", "blocks",
        "shared_bytes", "registers_estimated", "blocks_per_sm", "in_flight_bytes", "bytes_moved", "floor_us",
        "time_us", "bound", "candidates", "refusals", "configuration", "tuned", "lookup",
        "in_place",
    }  # fmt: skip
    assert facts["refusals"][0]["rule"] == "rowwise"
    assert facts["candidates"][0]["time_us"] == facts["time_us"] == min(c["time_us"] for c in facts["candidates"])
    assert {a["tensor"]: a["strides"] for a in facts["accesses"]} == {
        "x": ["x_stride"], "bias": [], "out": ["out_stride"],
    }  # fmt: skip


def test_plan_and_explain_say_what_may_be_overwritten(run: Run) -> None:
    words = ("chains.py:scaled", "--target", "cuda")
    (facts,) = document(run("plan", *words, "--json"))["plans"]
    assert facts["in_place"] == [{"output": "out", "operand": "x"}]
    assert "in place  out= may write out over x" in run("plan", *words).stdout
    (told,) = document(run("explain", *words, "--json"))["explanations"]
    assert "in place" in told["sections"]
    assert "out= may write out over x" in run("explain", *words).stdout


def test_plan_of_other_sizes_and_types(run: Run) -> None:
    words = ("plan", "chains.py", "--target", "cuda", "--set", "N=100", "--set", "M=3", "--dtype", "f32", "--json")
    plans = document(run(*words))["plans"]
    assert [p["sizes"] for p in plans] == [{"M": 3, "N": 100}] * 2
    assert plans[0]["signature"] == "f32[M, N], f32[N], f32 -> f32[M, N]"


def test_explain(run: Run) -> None:
    text = run("explain", "chains.py", "--target", "cuda").stdout
    assert "add (line 11) is fused into relu (line 11)" in text
    assert "saves 2.0 KiB" in text  # 8 x 64 halves, not written and not read
    assert "chains.py:11" in text
    assert "out to f16 when stored" in text
    found = document(run("explain", "chains.py:normed", "--target", "cuda", "--json"))["explanations"]
    assert {"passes over the row", "why this regime", "rules that refused"} <= set(found[0]["sections"])


@pytest.mark.parametrize("length", [64, 4097, 65536, 1048576])
def test_explain_speaks_of_every_regime(run: Run, length: int) -> None:
    result = run("explain", "chains.py:normed", "--target", "cuda:h200", "--set", f"N={length}")
    assert result.exit_code == 0, result.output
    assert "estimated" in result.stdout
    if length == 1048576:
        assert "not in registers: a row of 1,048,576 elements" in result.stdout
        assert "not in a block's shared memory" in result.stdout


# ---------------------------------------------------------------- emit


def test_emit_check_and_drift(run: Run, tmp_path: Path) -> None:
    assert "4 written" in run("emit", "chains.py", "--target", "cuda:h200", "--out", "out").stdout
    check = ("emit", "chains.py", "--target", "cuda:h200", "--out", "out", "--check")
    assert run(*check).exit_code == 0
    file = tmp_path / "out/cuda-h200/scaled.cu"
    file.write_text(file.read_text().replace("relu", "glue"))
    drifted = run(*check)
    assert drifted.exit_code == 1
    assert "+// relu(x + bias) * scale." in drifted.stdout
    assert "scaled.cu: changed" in drifted.stderr
    facts = document(run(*check, "--json"), code=1)
    assert (facts["ok"], facts["files"]) == (False, 4)
    assert [d["kind"] for d in facts["differences"]] == ["changed"]
    assert "glue" in file.read_text(), "--check writes nothing"


def test_emit_all_targets(run: Run, tmp_path: Path) -> None:
    facts = document(run("emit", "chains.py:scaled", "--all-targets", "--json"))
    assert sorted(facts["written"]) == sorted(
        f"generated/{folder}/scaled{end}"
        for folder, suffix in (
            ("cuda-a100", ".cu"),
            ("cuda-h200", ".cu"),
            ("hip-mi300x", ".hip"),
            ("hip-mi355x", ".hip"),
        )
        for end in (suffix, "_reference.py")
    )
    assert "exclude each other" in error_of(run("emit", "chains.py", "--all-targets", "--target", "cuda"), 2)


def test_emit_alone_keeps_generated_in_step(run: Run, tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "chains.py").rename(tmp_path / "specs/chains.py")
    assert len(document(run("emit", "--json"))["written"]) == 16
    assert document(run("emit", "--check", "--json"))["files"] == 16
    text = (tmp_path / "specs/chains.py").read_text()
    (tmp_path / "specs/chains.py").write_text(text.replace("def scaled", "def shifted"))
    assert {d["kind"] for d in document(run("emit", "--check", "--json"), code=1)["differences"]} == {
        "missing",
        "stale",
    }
    assert len(document(run("emit", "--json"))["removed"]) == 8
    assert run("emit", "--check").exit_code == 0


# ---------------------------------------------------------------- inspect


@pytest.mark.parametrize("gpu", [H200, MI300X], ids=str)
def test_inspect_source_and_reference_are_what_is_emitted(run: Run, gpu: Any) -> None:
    (chain,) = load_chains("chains.py:scaled")
    kernel, reference = golden.emitted(chain, gpu)
    assert run("inspect", "chains.py:scaled", "--target", gpu).stdout == kernel.text
    assert run("inspect", "chains.py:scaled", "--target", gpu, "--what", "reference").stdout == reference.text
    facts = document(run("inspect", "chains.py:scaled", "--target", gpu, "--json"))
    assert facts == {"chain": "scaled", "target": gpu.name, "what": "source", "text": kernel.text}


def test_inspect_takes_one_chain(run: Run) -> None:
    message = error_of(run("inspect", "chains.py", "--target", "cuda"), 2)
    assert message.startswith("chains.py has 2 chains, and this takes one: chains.py:scaled, chains.py:normed")


def test_inspect_ptx_and_plan(run: Run) -> None:
    ptx = run("inspect", "chains.py:scaled", "--target", "cuda:sm_80", "--what", "ptx")
    if ptx.exit_code == 3:
        pytest.skip(ptx.stderr.splitlines()[0])
    assert ".entry scaled" in ptx.stdout
    assert "sm_80" in ptx.stdout
    assert "has no PTX" in error_of(run("inspect", "chains.py:scaled", "--target", "hip", "--what", "ptx"), 2)
    assert run("inspect", "chains.py:scaled", "--target", "cuda", "--what", "plan").stdout.startswith("scaled  f16")


@pytest.mark.parametrize("gpu", ["cuda:h200", "hip:gfx90a"])
def test_inspect_resources(run: Run, gpu: str) -> None:
    result = run("inspect", "chains.py:normed", "--target", gpu, "--what", "resources", "--json")
    if result.exit_code == 3:
        pytest.skip(result.stderr.splitlines()[0])
    facts = document(result)
    assert set(facts["resources"]) == {
        "registers", "scalar_registers", "spill_bytes", "scalar_spills", "stack_bytes", "static_shared_bytes",
        "dynamic_shared_bytes", "shared_bytes", "code_bytes", "serialized",
    }  # fmt: skip
    assert set(facts["occupancy"]) == {"blocks_per_sm", "warps_per_sm", "fraction", "limited_by"}
    assert facts["resources"]["registers"] > 0
    text = run("inspect", "chains.py:normed", "--target", gpu, "--what", "resources").stdout
    for word in ("registers", "spills", "stack frame", "shared memory", "occupancy", "compiler"):
        assert f"\n{word} " in text
    assert ("scalar registers" in text) is gpu.startswith("hip")
    assert ("simulated" in facts) is ("\nsimulated " in text) is gpu.startswith("hip")


def test_a_simulated_loop_is_called_that(run: Run) -> None:
    words = ["inspect", str(ROOT / "specs/gemm_bias_gelu.py"), "--what", "resources", "--target"]
    result = run(*words, "hip:mi300x", "--json")
    if result.exit_code == 3:
        pytest.skip(result.stderr.splitlines()[0])
    found = document(result)["simulated"]
    assert found["products"] == 16
    assert found["bound"] == "matrix"
    assert 0.5 < found["busy"]["matrix"] < 1.0
    assert "by a model, not measured" in run(*words, "hip:mi300x").stdout
    other = document(run(*words, "hip:gfx1100", "--json"))
    assert other["simulated"] is None
    assert "gfx1100 is no CDNA" in other["not_simulated"]


def test_profile_checklist_for_nvidia(run: Run) -> None:
    facts = document(run("inspect", "chains.py:normed", "--target", "cuda:h200", "--what", "profile", "--json"))
    counters = {c["name"]: c["expect"] for c in facts["checklist"]["counters"]}
    assert counters["dram__bytes_read.sum"].startswith("1,024 ")  # 8 x 64 halves
    assert counters["dram__bytes_write.sum"].startswith("1,024 ")
    assert counters["l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"] == "16"
    assert counters["l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum"].startswith("0")
    command = facts["checklist"]["commands"][0]["text"]
    assert "--kernel-name normed " in command
    assert all(name in command for name in counters)
    assert command.endswith("fusegen launch chains.py:normed --target cuda:h200 --set M=8 --set N=64")


@pytest.mark.parametrize(
    ("length", "dtype", "sectors"),
    [("4096", "f16", "16"), ("4096", "f32", "16"), ("4097", "f16", " to 1 more: rows start inside of sectors")],
)
def test_profile_expects_sectors(run: Run, length: str, dtype: str, sectors: str) -> None:
    """As ncu read them on an H200: 16 for whole vectors, between n and n + 1 for rows that start anywhere."""
    words = ("inspect", "chains.py:normed", "--target", "cuda:h200", "--what", "profile", "--json")
    facts = document(run(*words, "--set", f"N={length}", "--dtype", dtype))
    counters = {c["name"]: c["expect"] for c in facts["checklist"]["counters"]}
    assert counters["l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"].endswith(sectors)


def test_profile_checklist_for_amd(run: Run) -> None:
    text = run("inspect", "chains.py:normed", "--target", "hip:mi300x", "--what", "profile").stdout
    for word in ("rocprofv3 --kernel-include-regex '^normed$'", "rocprof -i", "rocprof-compute profile", "FETCH_SIZE"):
        assert word in text


def test_profile_without_a_compiler_says_estimated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.runtime.cache.known_version", raising(MissingError("no compiler")))
    text = run("inspect", "chains.py:normed", "--target", "cuda:h200", "--what", "profile").stdout
    assert "not compiled here" in text


def raising(error: Exception) -> Any:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


# ---------------------------------------------------------------- compile and validate


def need_compiled(result: Result) -> Result:
    if result.exit_code == 3:
        pytest.skip(result.output.splitlines()[0])
    return result


@needs_compiler
@pytest.mark.parametrize("gpu", ["cuda:h200", "hip:gfx90a"])
def test_compile_reports_and_validates(run: Run, gpu: str) -> None:
    text = need_compiled(run("compile", "chains.py:normed", "--target", gpu)).stdout
    assert text.startswith("ok    normed  for ")
    for word in ("registers", "spills", "gate              passed", "validation", "of the error bound"):
        assert word in text
    facts = document(run("compile", "chains.py:normed", "--target", gpu, "--json"))
    (kernel,) = facts["kernels"]
    assert facts["ok"] is kernel["ok"] is kernel["validation"]["ok"] is True
    assert set(kernel) == {
        "chain", "sizes", "target", "ok", "seconds", "gate", "validation", "error", "entry", "arch", "compiler",
        "compile_seconds", "binary_bytes", "threads", "resources", "occupancy",
    }  # fmt: skip
    assert kernel["validation"]["report"]["cases"]


def test_compile_a_folder_without_validation(run: Run) -> None:
    result = need_compiled(run("compile", "chains.py", "--target", "cuda:sm_80", "--no-validate"))
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:3]] == [["ok", "scaled"], ["ok", "normed"]]
    assert "not validated: --no-validate" in result.stdout
    facts = document(run("compile", "chains.py", "--target", "cuda:sm_80", "--no-validate", "--json"))
    assert [kernel["validation"]["ok"] for kernel in facts["kernels"]] == [None, None]


@needs_compiler
def test_validate(run: Run) -> None:
    words = ("validate", "chains.py", "--target", "hip:mi300x", "--on", "emulator", "--quick", "--set", "N=37")
    text = run(*words)
    assert text.exit_code == 0, text.output
    assert "2 of 2 kernels agree with their references" in text.stdout
    assert "emulator (checking), warp 64" in text.stdout
    facts = document(run(*words, "--dtype", "f32", "--json"))
    assert [kernel["chain"] for kernel in facts["kernels"]] == ["scaled", "normed"]
    assert facts["kernels"][0]["sizes"] == {"M": 8, "N": 37}


@needs_compiler
def test_auto_says_what_it_ran_on(run: Run) -> None:
    (kernel,) = document(run("validate", "chains.py:normed", "--target", "hip:mi300x", "--quick", "--json"))["kernels"]
    assert kernel["on"]


@needs_compiler
def test_validate_at_each_length_where_the_plan_changes(run: Run, tmp_path: Path) -> None:
    words = ("--target", "cuda", "--on", "emulator", "--quick", "--lengths")
    kernels = document(run("validate", "chains.py:scaled", *words, "--set", "N=3", "--json"))["kernels"]
    lengths = [kernel["sizes"]["N"] for kernel in kernels]
    assert {1, 2, 3, 4, 31, 32, 33} <= set(lengths)
    (tmp_path / "fixed.py").write_text(SPEC.replace("N]", "64]").replace(", N=64", ""))
    message = error_of(run("validate", "fixed.py:scaled", *words), 2)
    assert message == "scaled: its row length is always 64; make it a Dim to vary it\n"


@needs_compiler
def test_a_wrong_kernel_is_exit_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that subtracts where it should add, found by its own validation."""

    def wrong(plan: Plan) -> Source:
        source = render(plan)
        return replace(source, text=source.text.replace("x + bias", "x - bias"))

    monkeypatch.setattr("fusegen.pipeline.render", wrong)
    result = run("validate", "chains.py:scaled", "--target", "cuda", "--on", "emulator", "--quick")
    assert result.exit_code == 1
    assert result.stdout.startswith("FAIL  scaled")
    assert "expected" in result.stdout
    facts = document(run("compile", "chains.py:scaled", "--target", "cuda", "--json"), code=1)
    assert facts["kernels"][0]["validation"]["ok"] is False


def test_a_refused_source_is_exit_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.pipeline.build", raising(CompileError("nvrtc refused scaled.cu")))
    result = run("compile", "chains.py", "--target", "cuda")
    assert result.exit_code == 1
    assert "nvrtc refused scaled.cu" in result.stdout


def test_a_missing_runtime_compiler_is_exit_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "hiprtc, which compiles HIP sources, is missing here\n  to get it: install ROCm"
    monkeypatch.setattr("fusegen.runtime.cache.known_version", raising(MissingError(message)))
    assert error_of(run("compile", "chains.py:scaled", "--target", "hip"), 3) == message + "\n"
    facts = document(run("compile", "chains.py:scaled", "--target", "hip", "--json"), code=3)
    assert facts == {"error": {"kind": "MissingError", "message": message, "exit_code": 3}}


def test_a_missing_cxx_compiler_is_exit_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = EmulatorUnavailable("the emulator needs a C++ compiler and found none")
    monkeypatch.setattr("fusegen.emulator.toolchain.compiler_for", raising(missing))
    message = error_of(run("validate", "chains.py:scaled", "--target", "cuda", "--on", "emulator"), 3)
    assert message.startswith("the emulator needs a C++ compiler")


def test_a_kernel_that_can_not_be_run_here_has_not_failed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    need_compiled(run("compile", "chains.py:scaled", "--target", "cuda", "--no-validate"))
    missing = EmulatorUnavailable("the emulator needs a C++ compiler and found none")
    monkeypatch.setattr("fusegen.emulator.toolchain.compiler_for", raising(missing))
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(Path.cwd() / "fresh"))
    result = run("compile", "chains.py:scaled", "--target", "cuda")
    assert result.exit_code == 3
    assert result.stdout.startswith("-     scaled")
    assert "not validated: the emulator needs a C++ compiler" in result.stdout


def test_a_missing_gpu_is_exit_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.runtime.finding.matching", lambda target: ())
    message = error_of(run("validate", "chains.py", "--target", "hip", "--on", "gpu"), 3)
    assert "no GPU here runs hip:mi300x" in message
    assert "--on emulator" in message


@needs_compiler
def test_launch_runs_a_kernel_for_a_profiler(run: Run) -> None:
    result = run("launch", "chains.py:scaled", "--target", "cuda", "--on", "emulator", "--launches", "2")
    assert result.stdout == "scaled: 2 launches on emulator\n", result.output


# ---------------------------------------------------------------- wrong requests


@pytest.mark.parametrize(
    ("change", "line", "says"),
    [
        (("x + bias", "x + bia"), 11, "NameError"),
        (("F.relu", "F.rleu"), 11, "unknown op F.rleu\n  did you mean F.relu?"),
        (("bias: f16[N]", "bias: f16[K]"), 8, "K"),
        (("return F.relu", "return x > 0 and F.relu"), 11, "a Python branch on a traced value"),
        (("def normed(x: f16[M, N])", "def normed(x)"), 14, "parameter 'x' has no type"),
        (("@chain(M=8, N=64)\ndef normed", "@chain(M=8, N=64)\ndef normed("), 15, "not Python"),
    ],
    ids=["name", "op", "shape", "branch", "type", "syntax"],
)
def test_a_wrong_spec_is_one_sentence_with_its_place(
    run: Run, tmp_path: Path, change: tuple[str, str], line: int, says: str
) -> None:
    text = SPEC.replace(*change).replace('dims("M N")', 'dims("M N")')
    if "K" in change[1]:
        text = text.replace('M, N = dims("M N")', 'M, N = dims("M N"); (K,) = dims("K")').replace("M=8", "K=3, M=8", 1)
    (tmp_path / "chains.py").write_text(text)
    message = error_of(run("plan", "chains.py", "--target", "cuda"), 2)
    place, _, sentence = message.partition(": ")
    assert place.startswith("chains.py:")
    assert abs(int(place.removeprefix("chains.py:")) - line) <= 3
    assert says in sentence


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan", "nowhere.py"), "there is no spec at nowhere.py"),
        (("plan", "chains.py", "M=5"), "a size of a chain is an option: --set M=5"),
        (("plan", "chains.py:other"), "chains.py has no chain 'other'; it has scaled, normed"),
        (("plan", "chains.py", "--set", "Q=3"), "--set Q: no chain here has that dim; there are M, N"),
        (("plan", "chains.py", "--set", "N"), "--set N: write a dim and its size, as in --set M=5"),
        (("plan", "chains.py", "--set", "N=0"), "N=0"),
        (("plan", "chains.py", "--dtype", "f8"), "--dtype f8: arrays are stored as f16, bf16, f32"),
        (("plan", "chains.py", "--target", "cuda:h300"), "'cuda:h300' is not a target"),
        (("validate", "chains.py", "--target", "cuda", "--on", "abacus"), "'abacus' names no device; say auto, gpu"),
    ],
)
def test_a_wrong_request_is_exit_2(run: Run, words: tuple[str, ...], says: str) -> None:
    target = () if "--target" in words else ("--target", "cuda")
    assert says in error_of(run(*words, *target), 2)


@pytest.mark.parametrize(
    "words",
    [
        ("frobnicate",),
        ("plan",),
        ("plan", "x", "--what"),
        ("inspect", "x", "--what", "y"),
        ("validate", "chains.py", "--seed", "-5"),
    ],
)
def test_bad_usage_is_exit_2(run: Run, words: tuple[str, ...]) -> None:
    assert run(*words).exit_code == 2
    result = run(*words, "--json")
    assert "Usage: " in result.stderr
    error = document(result, code=2)["error"]
    assert (error["kind"], error["exit_code"]) == ("UsageError", 2)
    assert error["message"] in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("verb", ["plan", "explain"])
def test_a_chain_without_a_plan_hides_no_other(run: Run, tmp_path: Path, verb: str) -> None:
    text = f"\n\n@chain(N={2**32}, M=8)\ndef unplanned(x: f16[M, N]) -> f16[M, N]:\n    return F.softmax(x)\n"
    (tmp_path / "chains.py").write_text(text.join(SPEC.rsplit("\n\n\n", 1)))
    result = run(verb, "chains.py", "--target", "cuda")
    assert all(f"{name}  f16" in result.stdout for name in ("scaled", "normed"))
    assert "no rule can plan unplanned on cuda:h200" in error_of(result, 2)
    assert document(run(verb, "chains.py", "--target", "cuda", "--json"), 2)["error"]["kind"] == "NoPlan"


@pytest.fixture
def broken(tmp_path: Path) -> Callable[[Result], str]:
    """A folder `some` of two specs, between whose files two are wrong; what a verb says of these."""
    some = tmp_path / "some"
    some.mkdir()
    (some / "a.py").write_text(SPEC)
    (some / "b.py").write_text("import nothing_of_that_name\n")
    (some / "c.py").write_text(SPEC.replace("x + bias", "x + bia"))
    (some / "d.py").write_text(SPEC.replace("def scaled", "def other").replace("def normed", "def another"))

    def said(result: Result) -> str:
        assert result.exit_code == 2, result.output
        assert "some/b.py:1: ModuleNotFoundError while the spec ran" in result.stderr
        assert "some/c.py:11: NameError while the spec ran" in result.stderr
        assert "Traceback" not in result.output
        return result.stdout

    return said


def test_a_bad_spec_stops_no_other(run: Run, broken: Callable[[Result], str]) -> None:
    every = ("scaled", "normed", "other", "another")
    for words in (("list", "some"), ("plan", "some", "--target", "cuda"), ("explain", "some", "--target", "cuda")):
        text = broken(run(*words))
        assert all(re.search(rf"^{name} +f16", text, re.MULTILINE) for name in every)
    found = json.loads(broken(run("list", "some", "--json")))
    assert [chain["name"] for chain in found["chains"]] == list(every)
    assert [(e["kind"], e["exit_code"]) for e in found["passed_over"]] == [("SpecError", 2)] * 2
    files = [f"some/{name}.py" for name in "bacd"]  # as a shell gives them
    assert len(json.loads(broken(run("plan", *files, "--target", "cuda", "--json")))["plans"]) == 4
    assert "passed_over" not in document(run("list", "some/a.py", "--json")), "it is of one verb"
    alone = run("plan", "some/b.py", "some/c.py", "--json")
    assert document(alone, 2)["error"]["message"].startswith("some/c.py:11: ")
    assert "some/b.py:1: " in alone.stderr


def test_what_a_bad_spec_has_emitted_stays(run: Run, tmp_path: Path) -> None:
    specs = tmp_path / "specs"
    specs.mkdir()
    (specs / "a.py").write_text(SPEC)
    (specs / "b.py").write_text(SPEC.replace("def scaled", "def third").replace("def normed", "def fourth"))
    assert run("emit").exit_code == 0
    kept = sorted(tmp_path.glob("generated/*/third*"))
    assert len(kept) == 8
    (specs / "b.py").write_text("oops")
    for words in (("emit",), ("emit", "specs", "--check", "--all-targets")):
        result = run(*words)
        assert (result.exit_code, "specs/b.py:1: NameError" in result.stderr) == (2, True)
    assert sorted(tmp_path.glob("generated/*/third*")) == kept


def test_what_has_no_plan_stops_no_other_from_being_emitted(run: Run, tmp_path: Path) -> None:
    text = f"\n\n@chain(N={2**32}, M=8)\ndef unplanned(x: f16[M, N]) -> f16[M, N]:\n    return F.softmax(x)\n"
    (tmp_path / "chains.py").write_text(SPEC + text)
    result = run("emit", "chains.py", "--target", "cuda")
    assert (result.exit_code, "no rule can plan unplanned" in result.stderr) == (2, True)
    assert "4 written" in result.stdout
    assert error_of(run("emit", "chains.py:unplanned", "--target", "cuda"), 2).startswith("no rule can plan unplanned")


def test_a_size_that_one_chain_can_not_have(run: Run, tmp_path: Path) -> None:
    chosen = "\n\n@chain(M=8, N=64)\ndef chosen(x: f16[M, N]) -> f16[M, 8]:\n    return F.topk(x, 8)[0]\n"
    (tmp_path / "chains.py").write_text(SPEC + chosen)
    result = run("plan", "chains.py", "--target", "cuda", "--set", "N=4")
    assert result.exit_code == 2
    assert "k is 8, but the rows of chosen have 4 columns" in result.stderr
    assert "scaled  f16" in result.stdout


@needs_compiler
def test_validating_a_folder_with_a_bad_spec(run: Run, broken: Callable[[Result], str]) -> None:
    words = ("validate", "some", "--target", "cuda", "--on", "emulator", "--quick", "--set", "M=3")
    assert "4 of 4 kernels agree" in broken(run(*words))
    facts = json.loads(broken(run(*words, "--json")))
    assert (facts["ok"], len(facts["kernels"]), len(facts["passed_over"])) == (False, 4, 2)


def test_what_memory_cannot_hold_is_exit_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 52.2 GiB")

    monkeypatch.setattr("fusegen.cli.builds.validate_one", full)
    message = error_of(run("validate", "chains.py", "--target", "cuda", "--on", "emulator"), 3)
    assert "Unable to allocate 52.2 GiB\n  ask for smaller sizes with --set" in message


def test_a_spec_that_cannot_be_read_has_not_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read = SourceFileLoader.get_data

    def refused(self: SourceFileLoader, path: str) -> bytes:
        if path.endswith("chains.py"):
            raise PermissionError(13, "Permission denied", path)
        return read(self, path)

    monkeypatch.setattr(SourceFileLoader, "get_data", refused)
    assert error_of(run("plan", "chains.py"), 2).startswith("chains.py can't be read: Permission denied")


def test_an_unexpected_exception_is_called_a_bug(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.cli.programs.candidates", raising(ZeroDivisionError("division by zero")))
    result = run("plan", "chains.py", "--target", "cuda")
    assert result.exit_code == 70
    assert "Traceback" in result.stderr
    assert "this is a bug in fusegen" in result.stderr


@pytest.mark.parametrize(
    ("does", "code", "says"),
    [
        ("raise KeyboardInterrupt", 130, "interrupted"),
        ("raise GeneratorExit('enough')", 2, "chains.py:1: GeneratorExit while the spec ran: enough"),
        ("raise type('Own', (BaseException,), {})('enough')", 2, "chains.py:1: Own while the spec ran: enough"),
        ("import os; os._exit(3)", 2, "chains.py:1: SystemExit while the spec ran: 3"),
        ("import sys; sys.exit()", 2, "chains.py:1: SystemExit while the spec ran: "),
    ],
)
def test_a_spec_that_wants_to_leave(run: Run, tmp_path: Path, does: str, code: int, says: str) -> None:
    (tmp_path / "chains.py").write_text(does)
    leave = os._exit
    assert error_of(run("list", "chains.py"), code) == f"{says}\n"
    error = document(run("list", "chains.py", "--json"), code)["error"]
    assert (error["message"], error["exit_code"]) == (says, code)
    assert os._exit is leave


def test_a_spec_may_start_processes(run: Run, tmp_path: Path) -> None:
    """What it forks ends as it means to."""
    forked = "import os\nif not (child := os.fork()):\n    os._exit(7)\n"
    (tmp_path / "chains.py").write_text(
        f"{forked}assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n{SPEC}"
    )
    assert run("list", "chains.py").exit_code == 0


def test_what_a_spec_prints_stays_out_of_json(run: Run, tmp_path: Path) -> None:
    (tmp_path / "chains.py").write_text(SPEC + 'print("hello")\n')
    result = run("list", "chains.py", "--json")
    assert [chain["name"] for chain in json.loads(result.stdout)["chains"]] == ["scaled", "normed"]
    assert "hello" in result.stderr


def test_a_chain_that_is_named_twice_counts_once(run: Run, tmp_path: Path) -> None:
    words = ("chains.py:normed", "chains.py", str(tmp_path / "chains.py"), ".")
    chains = document(run("plan", *words, "--target", "cuda", "--json"))["plans"]
    assert [chain["chain"] for chain in chains] == ["normed", "scaled"]
    (tmp_path / "others.py").write_text(SPEC)  # of the same names, and others all the same
    assert len(document(run("plan", ".", "others.py", "--target", "cuda", "--json"))["plans"]) == 4


def test_sizes_go_to_the_chains_that_have_them() -> None:
    chains = asking.ask_chains([str(ROOT / "specs")], ["T=3", "M=5"])
    assert {c.name: dict(c.graph.sizes) for c in chains}["log_softmax"]["T"] == 3
    assert {c.name: dict(c.graph.sizes) for c in chains}["rmsnorm"]["M"] == 5
    with pytest.raises(RequestError, match="takes one"):
        asking.ask_chain(str(ROOT / "specs"))


# ---------------------------------------------------------------- how it goes out


def test_help_reads_well(run: Run) -> None:
    text = run("--help").stdout
    for verb in ("list", "plan", "explain", "emit", "compile", "inspect", "validate", "doctor"):
        assert f" {verb} " in text
        assert "--json" in run(verb, "--help").stdout
    assert " launch " not in text
    assert run("--version").stdout == f"fusegen {fusegen.__version__}\n"


def test_json_has_no_infinities(capsys: pytest.CaptureFixture[str]) -> None:
    showing.print_json({"a": float("inf"), "b": [float("nan")], "c": (1, "x", None, True)})
    assert json.loads(capsys.readouterr().out) == {"a": "inf", "b": ["nan"], "c": [1, "x", None, True]}


@pytest.mark.parametrize(
    ("codes", "worst"), [((), 0), ((0, 0), 0), ((0, 2), 2), ((3, 2), 3), ((3, 1, 2), 1), ((0, 74), 74)], ids=str
)
def test_the_worst_of_many(codes: tuple[int, ...], worst: int) -> None:
    assert showing.worst(codes) == worst


def shell(*words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*COMMAND, *words], capture_output=True, cwd=ROOT, timeout=60, **more)


def test_a_pipe_gets_the_bytes_of_the_source(tmp_path: Path) -> None:
    (chain,) = load_chains(ROOT / "specs/rmsnorm.py")
    piped = shell("inspect", "specs/rmsnorm.py", "--target", "hip:mi300x").stdout
    assert piped == golden.emitted(chain, MI300X)[0].text.encode()


@pytest.mark.parametrize("name", ["gemm_bias_gelu", "mlp"])  # a kernel and a program
def test_plan_says_what_one_order_of_sums_costs(run: Run, name: str) -> None:
    spec = ROOT / f"specs/{name}.py"
    said = run("plan", spec, "--target", "cuda:h200", "--set", "M=16", "--batch-invariant").stdout
    assert re.search(r"batch +one order of sums for any number of rows: [\d.]+ us expected, [\d.]+ without it", said)


def test_a_closed_pipe_is_no_accident() -> None:
    """`fusegen list --ops | head -1`"""
    one = subprocess.Popen([*COMMAND, "list", "--ops"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert one.stdout is not None
    assert one.stderr is not None
    one.stdout.readline()
    one.stdout.close()
    said = one.stderr.read()
    one.stderr.close()
    one.wait(timeout=60)
    assert said == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize(
    "words",
    [
        "list", "list --json", "plan --help", "--version", "emit specs/copy.py --target cuda:h200 --check",
        "inspect specs/copy.py --target cuda", "db export --shipped -",
    ],
)  # fmt: skip
def test_output_that_can_not_be_written_is_one_sentence(words: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*COMMAND, *words.split()], stdout=full, stderr=subprocess.PIPE, cwd=ROOT)
    assert done.stderr == b"the output can't be written: No space left on device\n"
    assert done.returncode == 74


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_errors_keep_their_exit_codes_when_nothing_can_be_written() -> None:
    with Path("/dev/full").open("wb") as full:
        for words in ("plan nosuch --json", "plan --json", "frobnicate"):
            done = subprocess.run([*COMMAND, *words.split()], stdout=full, stderr=subprocess.PIPE, cwd=ROOT)
            assert (done.returncode, b"Traceback" in done.stderr) == (2, False)
        silent = subprocess.run([*COMMAND, "plan", "nosuch", "--json"], stdout=full, stderr=full, cwd=ROOT)
        assert silent.returncode == 2


def test_a_folder_that_can_not_be_written_is_exit_74(run: Run) -> None:
    said = error_of(run("emit", "chains.py", "--target", "cuda", "--out", "chains.py/x"), 74)
    assert "can't be written: Not a directory\n  name another folder with --out" in said
    if Path("/proc").is_dir():  # where not even root may make a file
        said = error_of(run("emit", "chains.py", "--target", "cuda", "--out", "/proc/x"), 74)
        assert said.startswith("/proc/x can't be written: ")


def test_a_full_disk_is_exit_74(tmp_path: Path) -> None:
    """No file may grow beyond a few bytes, which is how a full disk begins."""
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99)); from fusegen.cli.app import main; main()"
    )
    words = ("emit", "specs/copy.py", "--target", "cuda", "--out", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", limited, *words], capture_output=True, cwd=ROOT, text=True)
    assert (done.returncode, done.stdout) == (74, "")
    assert done.stderr.startswith(f"{tmp_path}/cuda-h200/copy.cu can't be written: File too large\n")
    assert not [file for file in tmp_path.rglob("*") if file.is_file()], "half a file"


def test_a_full_disk_under_temporary_files_is_exit_74(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x.cubin")
    monkeypatch.setattr("fusegen.cli.inspecting.look", raising(full))
    said = error_of(run("inspect", "chains.py:scaled", "--target", "cuda"), 74)
    assert said.startswith("/tmp/x.cubin can't be written: No space left on device\n  free space there")


def test_a_folder_in_a_file_s_place(run: Run, tmp_path: Path) -> None:
    (tmp_path / "generated/cuda-h200/scaled.cu").mkdir(parents=True)
    for words in (("emit", "chains.py"), ("emit", "chains.py", "--check")):
        said = error_of(run(*words, "--target", "cuda:h200"), 2)
        assert "generated/cuda-h200/scaled.cu can't be read: Is a directory" in said


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_folder_whose_name_is_no_text(tmp_path: Path, encoding: str) -> None:
    """In JSON it reads back as Python has it; as text it is escaped."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    environment = {**os.environ, "FUSEGEN_CACHE_DIR": str(folder), "PYTHONIOENCODING": f"{encoding}:strict"}
    found = shell("cache", "info", "--json", env=environment)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.decode())["folder"] == str(folder)
    said = shell("cache", "info", env=environment)
    assert said.stdout.startswith(rf"the cache in {tmp_path}/caf\udce9".encode())


def test_closed_outputs() -> None:
    """`fusegen list >&-`, `fusegen list 2>&-`"""
    for closing, code, says in ((">&-", 74, b"the output can't be written: it is closed\n"), ("2>&-", 0, b"")):
        command = f"{sys.executable} -m fusegen list {closing}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, cwd=ROOT)
        assert (done.returncode, done.stderr) == (code, says)


def test_plain_text_in_a_pipe() -> None:
    done = shell("plan", "specs/rmsnorm.py", "--target", "cuda", "--all")
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout
    assert all(line == line.rstrip() for line in done.stdout.decode().splitlines())


def test_help_answers_at_once() -> None:
    """0.3 s on an idle machine; the bound leaves room for a busy one."""
    start = time.perf_counter()
    assert shell("--help").returncode == 0
    assert time.perf_counter() - start < 3
    loaded = shell("--help", env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}).stderr.decode()
    heavy = [
        name
        for name in ("jinja2", "fusegen.planner", "fusegen.runtime", "cuda.core", "torch")
        if f" {name}\n" in loaded
    ]
    assert not heavy


@needs_compiler
def test_the_demo_makes_a_kernel() -> None:
    """`make demo` is a newcomer's first command, and its script stands outside of the package."""
    demo = runpy.run_path(str(ROOT / "scripts" / "demo.py"))
    (copied,) = load_chains(ROOT / "specs" / "copy.py")
    assert demo["make"](copied, H200).validation.ok
