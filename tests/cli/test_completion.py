"""What a shell is told to complete with, and the place of an error in a spec."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusegen.cli.app import app
from fusegen.cli.excerpts import excerpt
from fusegen.errors import SpecError, Where

SPEC = """from fusegen import bf16, chain, dims
from fusegen import ops as F

M, N = dims("M N")


@chain(M=8192, N=4096)
def scaled(x: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
    ä = x * gain; y = F.rmsnorm(ä, gainn)
    return y
"""


def completed(monkeypatch: pytest.MonkeyPatch, words: str) -> list[str]:
    """What bash would offer for the last word."""
    monkeypatch.setenv("_FUSEGEN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"fusegen {words}")
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ") + 1))
    return CliRunner().invoke(app, [], prog_name="fusegen").stdout.split()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("comp", ["compile"]),
        ("plan sc", ["scaled.py"]),
        ("plan fold", ["folder/"]),
        ("plan folder/", ["folder/inner.py"]),
        ("plan scaled.py:", ["scaled.py:scaled"]),
        ("plan scaled.py --target cuda:h1", ["cuda:h100"]),
        ("compile scaled.py --target cuda:h1", ["cuda:h100"]),
        ("tune scaled.py --target cuda:a100,cuda:h1", ["cuda:a100,cuda:h100"]),
        ("plan scaled.py --set ", ["M=", "N="]),
        ("plan scaled.py --set N", ["N="]),
        ("plan missing.py:", []),
    ],
)
def test_a_shell_completes(words: str, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scaled.py").write_text(SPEC)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner.py").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    assert completed(monkeypatch, words) == wanted


def test_an_error_shows_its_line_with_carets(tmp_path: Path) -> None:
    spec = tmp_path / "scaled.py"
    spec.write_text(SPEC)
    result = CliRunner().invoke(app, ["plan", str(spec)])
    assert result.exit_code == 2
    message, line, carets = result.stderr.splitlines()
    assert message.endswith("scaled.py:9: NameError while the spec ran: name 'gainn' is not defined")
    assert line == "  9 |     ä = x * gain; y = F.rmsnorm(ä, gainn)"
    assert carets == "    |" + " " * (line.index("gainn") - line.index("|") - 1) + "^" * len("gainn")


def test_without_columns_the_whole_line_is_marked(tmp_path: Path) -> None:
    spec = tmp_path / "scaled.py"
    spec.write_text(SPEC)
    lines = excerpt(SpecError("wrong", Where(str(spec), 10))).splitlines()
    assert lines == ["  10 |     return y", "     |     ^^^^^^^^"]
    assert excerpt(SpecError("wrong", Where(str(spec), 99))) == ""
    assert excerpt(SpecError("wrong", Where(str(tmp_path / "none.py"), 1))) == ""
    assert excerpt(ValueError("of nowhere")) == ""
