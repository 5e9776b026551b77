"""The house in rooms: who may import whom, and a page that maps every file."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

# Lowest first. A file may import from its own room and from those below it; rooms in one line don't know each other.
ROOMS = (
    "errors version",
    "language storage",
    "targets derivatives",
    "planner emulator compiling",
    "emitting",
    "runtime database",
    "validation",
    "pipeline",
    "measuring exporting spreading",
    "operators",
    "tuning torch jax",
    "reporting",
    "cli",
    "__init__ __main__",
)
FLOOR = {room: floor for floor, line in enumerate(ROOMS) for room in line.split()}
# of its files, these
OF_THE_PLANNER = {
    "runtime": {
        "planner.launched",
        "planner.model",
        "planner.programs.model",
        "planner.programs.over_operands",
        "planner.programs.side_by_side",
    },
    "database": {"planner.model", "planner.rewrites"},
}
VENDORS = {"cuda", "hip", "rocm", "torch", "cupy", "jax", "ray"}
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fusegen"
PAGE = ROOT / "docs" / "architecture.md"


def name_of(path: Path) -> str:
    """`planner.rows.schedule`; a package is its folder's name."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


def imports(name: str) -> Iterator[str]:
    """The files of fusegen that a file imports, anywhere in its text."""
    for node in ast.walk(tree(name)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("fusegen.") in FILES else node.module for name in inner]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for found in names:
            other = found.removeprefix("fusegen.")
            if found != other and other in FILES and other != name:
                yield other


def test_no_import_goes_up() -> None:
    up = []
    for name in FILES:
        own = name.split(".")[0]
        for other in imports(name):
            room = other.split(".")[0]
            if room != own and FLOOR[room] >= FLOOR[own]:
                up.append(f"{name} imports {other}")
    assert not up


def test_who_obeys_plans_makes_none() -> None:
    for room, allowed in OF_THE_PLANNER.items():
        for name in FILES:
            if name.split(".")[0] == room:
                found = {other for other in imports(name) if other.split(".")[0] == "planner"}
                assert found <= allowed, f"{name} imports {found - allowed}"


def test_no_import_comes_back() -> None:
    """Raises CycleError, which names the files of the circle."""
    graphlib.TopologicalSorter({name: set(imports(name)) for name in FILES}).prepare()


def test_vendor_packages_are_imported_inside_functions() -> None:
    for name in FILES:
        for node in tree(name).body:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            assert VENDORS.isdisjoint(found.split(".")[0] for found in names), f"{name} imports {names} at its top"


def modules_after(statement: str, names: list[str]) -> str:
    """Which of `names` a fresh Python has imported after `statement`."""
    code = f"import sys\n{statement}\nprint(*sorted(set(sys.modules) & set({names})))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_fusegen_brings_no_package() -> None:
    packages = ["torch", "cupy", "jax", "hip", "cuda.core", "typer", "numpy", "jinja2"]
    assert modules_after("import fusegen", packages) == ""


def test_what_a_warm_start_imports_has_no_templates_compilers_or_checks() -> None:
    later = ["jinja2", "fusegen.emulator"]
    later += [f"fusegen.{name}" for name in ("emitting.rows.spelling", "compiling.nvrtc", "validation.checks")]
    later += [f"fusegen.planner.products.{name}" for name in ("gemm", "wgmma")]  # which wait for a product
    assert all(name.removeprefix("fusegen.") in FILES or name == "jinja2" for name in later)
    assert modules_after("import fusegen.pipeline", later) == ""


def test_no_file_is_two_ideas() -> None:
    """A module past 600 lines is asking to be split; the guide says 400, which a table of data may pass."""
    assert not {name: n for name, path in FILES.items() if (n := len(path.read_text().splitlines())) > 600}


# ---------------------------------------------------------------- the page


def first_line(name: str) -> str:
    return (ast.get_docstring(tree(name)) or "").partition("\n")[0]


def page() -> str:
    """Every room from the top down, and each of its files with the first line of its docstring."""
    text = [
        "# Architecture",
        "",
        "A chain goes through the rooms from `language` upwards: traced, planned, emitted, compiled, run, validated. A",
        "file imports only from its own room and from rooms below it, and no imports form a circle.",
        "",
        "This page lists every file with the first line of its docstring. `pytest --update-golden",
        "tests/test_architecture.py` writes it anew.",
    ]
    for line in reversed(ROOMS[:-1]):
        for room in line.split():
            text += ["", f"## {room}", "", first_line(room), ""]
            files = [name for name in FILES if name.startswith(f"{room}.")]
            text += [f"- `{name.removeprefix(f'{room}.').replace('.', '/')}`: {first_line(name)}" for name in files]
            if not files:
                text.pop()
    return "\n".join(text) + "\n"


def test_the_page_maps_every_file(request: pytest.FixtureRequest) -> None:
    assert not [name for name in FILES if not first_line(name)]
    if request.config.getoption("--update-golden"):
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
    found = PAGE.read_text(encoding="utf-8")
    assert found == page(), "pytest --update-golden tests/test_architecture.py writes it anew"


@pytest.mark.parametrize("broken", ["up", "around"])
def test_what_these_tests_see(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from fusegen.cli import app" if broken == "up" else "from fusegen.planner import model"
    files = {**FILES, "planner.traffic": FILES["planner.traffic"]}
    real = tree

    def with_fault(name: str) -> ast.Module:
        return ast.parse(source) if name == "planner.traffic" else real(name)

    monkeypatch.setitem(globals(), "FILES", files)
    monkeypatch.setitem(globals(), "tree", with_fault)
    with pytest.raises(AssertionError if broken == "up" else graphlib.CycleError):
        test_no_import_goes_up() if broken == "up" else test_no_import_comes_back()
