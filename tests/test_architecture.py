"""Imports point one way: each module may import from lines above it, and vendors' packages only inside functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

# modules by line, lowest first; a name covers everything below it
LAYERS = (
    "errors storage spec_source",
    "types",
    "tensor_map",
    "graph selection",
    "factor_words op_table",
    "trace ordering",
    "ops products",
    "spec naming",
    "reference torch_source",
    "targets.base",
    "targets.cuda targets.hip",
    "targets",
    "emulator",
    "compiling",
    "planner.traffic planner.held_rows planner.ranges",
    "planner.parts",
    "planner.model planner.heading",
    "planner.pieces planner.passes planner.limits planner.factors",
    "planner.schedule planner.bulk planner.gemm planner.wgmma",
    "planner.cost planner.product_cost planner.row_order",
    "planner.duration",
    "planner.assembly planner.holding planner.picking planner.gemm_duration",
    "planner.density planner.wgmma_cost",
    "planner.choosing",
    "planner.rules planner.spans",
    "planner",
    "unfusing",
    "prelude",
    "dialect",
    "vectors",
    "blocks",
    "bulk_rows",
    "fetching",
    "reducing",
    "spelling",
    "rolling selection_spelling",
    "held_spelling",
    "dense_spelling",
    "gemm_spelling wgmma_copying",
    "wgmma_spelling",
    "rendering",
    "sources",
    "runtime",
    "operands timing",
    "validation",
    "database.keys",
    "database.rows",
    "database.store",
    "database.lookup",
    "database",
    "pipeline",
    "golden profiling doctor explaining product_peers peers tuning",
    "counters",
    "benchmark",
    "plotting",
    "cli __main__",
)
RANK = {name: rank for rank, line in enumerate(LAYERS) for name in line.split()}
VENDORS = {"cuda", "hip", "rocm", "torch", "cupy", "jax"}
PACKAGE = Path(__file__).resolve().parent.parent / "fusegen"
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def rank_of(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in RANK:
            return RANK[".".join(parts[:length])]
    raise AssertionError(f"fusegen.{module} has no line in LAYERS")


def imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    own = name_of(path)
    if own in ("__init__", ""):
        return
    for name in imports(path):
        if not name.startswith("fusegen.") or name == "fusegen.__version__":
            continue
        module = name.removeprefix("fusegen.")
        known = PACKAGE / Path(*module.split("."))
        if not (known.with_suffix(".py").exists() or known.is_dir()):
            continue  # a name inside a module
        assert rank_of(module) <= rank_of(own), f"{own} imports {module}, which stands above it"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_vendor_packages_are_imported_inside_functions(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            assert name.split(".")[0] not in VENDORS, f"{path.name} imports {name} at its top"


def test_importing_fusegen_brings_no_package() -> None:
    packages = ["torch", "cupy", "jax", "hip", "cuda.core", "typer", "numpy", "jinja2"]
    code = f"import sys, fusegen; print(sorted(set(sys.modules) & set({packages})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_warm_start_imports_has_no_templates_compilers_or_checks() -> None:
    modules = [
        "jinja2",
        "fusegen.emitting.rows.spelling",
        "fusegen.compiling.nvrtc",
        "fusegen.validation.checks",
        "fusegen.emulator",
    ]
    modules += ["fusegen.planner.products.gemm", "fusegen.planner.products.wgmma"]  # which wait for a product
    code = f"import sys, fusegen.pipeline; print(sorted(set(sys.modules) & set({modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_file_is_two_ideas() -> None:
    """A module past 600 lines is asking to be split; the guide says 400, which a table of data may pass."""
    long = {name_of(p): n for p in MODULES if (n := len(p.read_text().splitlines())) > 600}
    assert not long
