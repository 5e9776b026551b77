"""Kernels that an expert signs: no text in generated/ holds what `tests/kernel_text.py` would strike out."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusegen.language.spec import Chain, load_chains
from tests import kernel_text
from tests.kernel_text import CHECKS, Text

ROOT = Path(__file__).resolve().parents[2]
CHAINS = {chain.name: chain for chain in load_chains(ROOT / "specs")}
KERNELS = sorted(path for path in (ROOT / "generated").glob("*/*") if path.suffix in (".cu", ".hip"))
# What a family of kernels does not pass yet
LEFT: dict[str, set[str]] = {
    "rows": {"aliases", "loops_of_one_trip", "numbers_without_a_name"},
    "selections": set(),
    "products": set(),
}
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
}


def family(chain: Chain) -> str:
    return "products" if chain.graph.products else "selections" if chain.graph.selections else "rows"


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_nothing_is_to_be_struck_out(path: Path) -> None:
    text, left = Text(path.read_text(encoding="utf-8")), LEFT[family(CHAINS[path.stem])]
    found = [f"{check.__name__}: {what}" for check in CHECKS if check.__name__ not in left for what in check(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", FAULTS)
def test_each_check_finds_its_fault(name: str) -> None:
    found = list(getattr(kernel_text, name)(Text(FAULTS[name])))
    assert len(found) == 1, found


def test_every_check_has_a_fault() -> None:
    assert [check.__name__ for check in CHECKS] == list(FAULTS)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_kernel_opens_with_the_body_of_its_spec(path: Path) -> None:
    """Every line of it, as the author wrote it, behind the kernel's name and the spec's docstring."""
    opening = path.read_text(encoding="utf-8").split("\n\n")[0]
    body = CHAINS[path.stem].graph.body
    assert body
    assert "\n".join(f"//     {line}".rstrip() for line in body.splitlines()) + "\n//\n" in opening
