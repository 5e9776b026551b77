"""Kernels that an expert signs: no text in generated/ holds what `tests/kernel_text.py` would strike out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fusegen.emitting.rendering import render
from fusegen.planner import candidates
from fusegen.planner.model import Layout, RowPlan
from fusegen.targets import Target
from tests import kernel_text
from tests.kernel_text import CHECKS, Text, loops_of_one_trip, numbers_without_a_name, unused_names
from tests.specs import SHIPPED

ROOT = Path(__file__).resolve().parents[2]
CHAINS = SHIPPED
ONE_KERNEL = sorted(path for path in (ROOT / "generated").glob("*/*") if path.suffix in (".cu", ".hip"))
KERNELS = sorted(path for path in (ROOT / "generated").rglob("*") if path.suffix in (".cu", ".hip"))
# A text for each check, of which it has to find one line
FAULTS = {
    "unused_names": "void f() { const int a = 1, b = 2; g(a); } void g(int c) { f(); h(c); }",
    "aliases": "void f(int tile) { const int number = tile; f(number + 1); }",
    "loops_of_one_trip": "void f() { constexpr int n = 4; for (int i = n; i > 2; i /= 2) f(i); }",
    "numbers_without_a_name": "void f(int i) { constexpr int size = 65 * 2; f(i * size); f(64 * i); f(i * 65); }",
    "branches_alike": "void f(bool a) { if (a) { f(!a); } else { f(!a); } f(a ? true : false); }",
    "functions_alike": "void f(int i) { g(i - 1); } void g(int i) { g(i - 1); } void h(int i) { f(i - 1); }",
    "names_of_the_c_library": "void f(int i) { const int floor = i + 1; f(floor); }",
    "ordinal_names": "void f(int add) { const int add_2 = add + 1; const int log_2 = add_2; f(log_2); }",
    "names_of_the_compiler": "void f(const float* v__ptr) { g(v__ptr); }",
}


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_nothing_is_to_be_struck_out(path: Path) -> None:
    text = Text(path.read_text(encoding="utf-8"))
    found = [f"{check.__name__}: {what}" for check in CHECKS for what in check(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["add_rmsnorm", "bias_relu", "masked_softmax"])
@pytest.mark.parametrize("size", [127, 1000, 4099, 32768])
def test_nor_in_kernels_of_rows_of_other_lengths(name: str, size: int, target: Target) -> None:
    """Of each way to pass over a row, aligned or not. Where shared memory has room for one of a thread's vectors, the
    loop over it keeps its index, by which the others are told apart."""
    chain = CHAINS[name].at(N=size)
    tensors = frozenset(t.name for t in (*chain.graph.inputs, *chain.graph.outputs))
    seen = set()
    for layout in (Layout(), Layout(unaligned=tensors)):
        for made in candidates(chain.graph, target, layout).plans:
            assert isinstance(made, RowPlan)
            tile = made.tile
            way = re.sub(r"[\d/x]+", "", made.configuration), tile.cluster > 1, tile.vector, tile.per_thread > 1
            if (way, layout) in seen or tile.kept == 1 < tile.per_thread:
                continue
            seen.add((way, layout))
            text = Text(render(made).text)
            found = [what for check in (loops_of_one_trip, numbers_without_a_name) for what in check(text)]
            found += [what for what in unused_names(text) if "constexpr" in what]
            assert not found, "\n".join([made.configuration, *found])


@pytest.mark.parametrize("name", FAULTS)
def test_each_check_finds_its_fault(name: str) -> None:
    found = list(getattr(kernel_text, name)(Text(FAULTS[name])))
    assert len(found) == 1, found


def test_every_check_has_a_fault() -> None:
    assert [check.__name__ for check in CHECKS] == list(FAULTS)


@pytest.mark.parametrize("path", ONE_KERNEL, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_kernel_opens_with_the_body_of_its_spec(path: Path) -> None:
    """Every line of it, as the author wrote it, behind the kernel's name and the spec's docstring."""
    opening = path.read_text(encoding="utf-8").split("\n\n")[0]
    body = CHAINS[path.stem].graph.body
    assert body
    assert "\n".join(f"//     {line}".rstrip() for line in body.splitlines()) + "\n//\n" in opening
