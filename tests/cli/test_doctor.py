"""doctor: every check does the thing it vouches for, never raises, and what is missing comes with how to get it."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fusegen.cli import app, doctor
from fusegen.cli.doctor import Check, Examination, Vendor
from fusegen.emulator import EmulatorUnavailable
from fusegen.errors import CompileError, MissingError


def raising(error: Exception) -> Any:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def test_it_examines_this_machine() -> None:
    found = doctor.examine()
    names = [check.name for check in found.checks]
    assert names == [
        "Python", "NVRTC", "hiprtc", "NVIDIA GPU", "AMD GPU", "C++ compiler", "addr2line", "cache folder", "nvdisasm",
        "quick calls", "torch", "cupy", "jax",
    ]  # fmt: skip
    assert all(check.found for check in found.checks)
    assert all(check.advice for check in found.checks if check.state in ("missing", "broken"))
    assert [vendor.name for vendor in found.vendors] == ["CUDA", "HIP"]


def test_the_command_agrees_with_itself() -> None:
    text, plain = CliRunner().invoke(app, ["doctor"]), CliRunner().invoke(app, ["doctor", "--json"])
    facts = json.loads(plain.stdout)
    assert set(facts) == {"ok", "checks", "vendors"}
    assert set(facts["checks"][0]) == {"name", "state", "found", "advice"}
    assert set(facts["vendors"][0]) == {"name", "compiles", "runs_on", "ready"}
    assert text.exit_code == plain.exit_code == (0 if facts["ok"] else 3)
    for check in facts["checks"]:
        assert check["name"] in text.stdout


def test_a_missing_compiler_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = "hiprtc, which compiles HIP sources, is missing here\n  to get it: install ROCm"
    monkeypatch.setattr(doctor, "probed", raising(MissingError(advice)))
    check = doctor.hiprtc()
    assert check == Check("hiprtc", "missing", "hiprtc, which compiles HIP sources, is missing here", "install ROCm")


def test_a_compiler_that_fails_is_broken_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probed", raising(CompileError("refused\nlog")))
    assert (doctor.nvrtc().state, doctor.nvrtc().found) == ("broken", "refused")


def test_whatever_a_library_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probed", raising(ZeroDivisionError("deep in a driver")))
    assert doctor.nvrtc().state == "broken"
    assert "deep in a driver" in doctor.nvrtc().found
    monkeypatch.setattr("fusegen.runtime.finding.present", raising(ValueError("odd driver")))
    assert [check.state for check in doctor.gpus()] == ["broken", "broken"]


def test_no_cxx_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fusegen.emulator.toolchain.compiler_for",
        raising(EmulatorUnavailable("the emulator needs a C++ compiler and found none: install g++")),
    )
    check = doctor.emulator_compiler()
    assert check.state == "missing"
    assert "g++" in check.advice


def test_a_chosen_compiler_that_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = doctor.emulator_compiler()
    if check.state != "ok":
        pytest.skip(check.found)
    assert "CXX=no-such-compiler can't be used: there is no program no-such-compiler" in check.advice


def test_no_tool_for_source_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fusegen.emulator.kernel import line_tool

    monkeypatch.setenv("PATH", str(tmp_path))
    line_tool.cache_clear()
    try:
        check = doctor.line_tool()
        assert (check.state, check.advice) == ("optional", "apt install binutils")
        assert "lack their source line" in check.found
        (tmp_path / "llvm-addr2line").touch(0o755)
        line_tool.cache_clear()
        assert doctor.line_tool().found.startswith(f"{tmp_path}/llvm-addr2line: ")
    finally:
        line_tool.cache_clear()


def test_quick_calls_are_no_need(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = MissingError("there is no C compiler here\n  to get it: apt install gcc")
    for error, found, advice in (
        (missing, "there is no C compiler here", "apt install gcc"),
        (CompileError("`cc` can't compile it\nlog"), "`cc` can't compile it", "name another compiler in CC"),
        (OSError("no room"), "OSError: no room", "name another compiler in CC"),
    ):
        monkeypatch.setattr("fusegen.runtime.native.get", raising(error))
        check = doctor.quick_calls()
        assert (check.state, check.found) == ("optional", f"{found}; calls on torch tensors take some 1 us longer")
        assert advice in check.advice
    monkeypatch.setattr("fusegen.runtime.native.get", lambda: None)
    monkeypatch.setenv("CC", f"{sys.executable} cc")
    monkeypatch.setenv("CXX", f"{sys.executable} c++")
    made = f"on torch tensors they go through C, made by {sys.executable} cc"
    assert doctor.quick_calls().found == f"{made}, and {sys.executable} c++"
    monkeypatch.setattr("fusegen.runtime.guards.COMPILERS", ())
    monkeypatch.delenv("CXX")
    check = doctor.quick_calls()
    assert (check.state, check.advice) == ("optional", "apt install g++")
    assert check.found == f"{made}; without a C++ compiler they take some 1 us longer"


def test_an_unwritable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "file" / "below"))
    check = doctor.cache_folder()
    assert check.state == "broken"
    assert "FUSEGEN_CACHE_DIR" in check.advice


def test_array_libraries_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "cupy-cuda12x":
            raise metadata.PackageNotFoundError(name)
        return "14.0"

    monkeypatch.setattr("fusegen.cli.doctor.metadata.version", version)
    assert doctor.array_library("cupy").state == "ok"
    assert doctor.array_library("torch").state == "optional"


@pytest.mark.parametrize(
    ("compiles", "runs_on", "ready", "says"),
    [
        (True, ("NVIDIA H200", "the emulator"), True, "run on NVIDIA H200 and the emulator"),
        (True, (), False, "nothing here runs them"),
        (False, ("the emulator",), False, "not compiled; their text still runs in the emulator"),
        (False, (), False, "can be emitted, not compiled"),
    ],
)
def test_what_follows_for_a_vendor(compiles: bool, runs_on: tuple[str, ...], ready: bool, says: str) -> None:
    vendor = Vendor("CUDA", compiles, runs_on)
    assert vendor.ready is ready
    assert says in str(vendor)


def test_exit_code_when_nothing_can_be_compiled_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bleak = Examination((Check("NVRTC", "missing", "none", "pip install it"),), (Vendor("CUDA", False, ()),))
    monkeypatch.setattr(doctor, "examine", lambda: bleak)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 3
    assert "pip install it" in result.stdout
