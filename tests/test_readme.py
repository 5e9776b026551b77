"""README.md: its excerpts are the files they name, its Python runs, and its commands work as written.

`pytest --update-golden` rewrites the excerpts.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusegen import golden
from fusegen.cli import app
from fusegen.errors import MissingError
from fusegen.spec import load_chains
from fusegen.targets import target
from tests.tools import needs_compiler

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
QUOTED = re.compile(r"(<!-- (file|excerpt): (.*?) -->\n```[\w+]*\n)(.*?)(```\n)", re.DOTALL)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def quoted(kind: str, what: str) -> str:
    """What belongs under `<!-- file: ... -->` or `<!-- excerpt: chain for target -->`."""
    if kind == "file":
        return (ROOT / what).read_text()
    name, _, gpu = what.partition(" for ")
    (chain,) = load_chains(f"{ROOT}/specs/{name}.py")
    return excerpt(golden.emitted(chain, target(gpu))[0].text)


def excerpt(text: str) -> str:
    """The plan, the signature, the first walk and the last."""
    head, _, rest = text.partition("\n\n")
    body = rest[rest.index('extern "C"') :]
    first, _, others = body.partition("    // walk 2 of")
    last = others[others.rindex("    // walk ") :] if "    // walk " in others else ""
    return f"{head}\n\n// ...\n\n{first}    // ...\n\n{last}"


def test_quotes_are_what_they_quote(request: pytest.FixtureRequest) -> None:
    text = README.read_text()
    fresh = QUOTED.sub(lambda m: m[1] + quoted(m[2], m[3]) + m[5], text)
    if request.config.getoption("--update-golden"):
        README.write_text(fresh)
        return
    assert len(QUOTED.findall(text)) == 2
    assert fresh == text, "README.md quotes what is no longer so; `pytest --update-golden` writes it anew"


@needs_compiler
@pytest.mark.parametrize("number", range(3))
def test_python_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = blocks("python")[number]
    if "import torch" in code:
        pytest.importorskip("torch")
    file = tmp_path / "snippet.py"
    file.write_text(code)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(file), "exec"), {"__name__": "snippet"})


def commands() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith("fusegen ")]


@pytest.mark.parametrize("command", commands())
def test_commands_work_as_written(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    if result.exit_code == MissingError.exit_code:
        pytest.skip(result.output.splitlines()[0])
    assert result.exit_code == 0, result.output
    assert result.stdout


def test_every_make_target_is_there() -> None:
    named = set(re.findall(r"^make (\w+)", README.read_text() + (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    known = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= known
