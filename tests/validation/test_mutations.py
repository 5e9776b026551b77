"""The checker, checked: every deliberately broken kernel of `mutations.py` must fail validation, in the emulator.

Whatever passes a broken kernel would pass a bug. The unbroken kernels must pass, or being caught would mean nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

from fusegen.emulator import compiler
from fusegen.errors import FusegenError
from fusegen.planner.model import Layout, Source
from fusegen.runtime import Kernel, finding
from fusegen.validation import Report, validate
from tests.mutations import MUTATIONS, Mutation, Subject

try:
    compiler()
except FusegenError as error:
    pytest.skip(f"the emulator can't run here: {error}", allow_module_level=True)

Edit = Callable[[str], str]
SUBJECTS = tuple(dict.fromkeys(m.subject for m in MUTATIONS))
COUNTED = tuple(m for m in MUTATIONS if not m.blind)
FULL_CASES = ("normal", "layout")  # where a mutation needs more than a quick validation, it is an operand's layout
HANGS_S = 5.0  # a launch that ends takes a tenth of that; some broken kernels never do


@cache
def source_of(subject: Subject, layout: Layout) -> Source:
    return subject.source(layout)


def kernel_of(subject: Subject, edit: Edit) -> Kernel:
    """The subject's kernel with its text edited, in every layout."""

    def variant(layout: Layout) -> tuple[Source, None]:
        source = source_of(subject, layout)
        return replace(source, text=edit(source.text)), None

    device = finding.find(source_of(subject, Layout()).plan.target, "emulator")
    return Kernel(*variant(Layout()), device, variant)


def lenient(mutation: Mutation) -> Edit:
    """The mutation where it applies: a variant for another layout may have nothing to break."""

    def edit(text: str) -> str:
        try:
            return mutation.apply(text)
        except AssertionError:
            return text

    return edit


@pytest.fixture(scope="module")
def scores() -> Iterator[dict[str, str]]:
    """What caught each mutation; printed as a table at the end."""
    found: dict[str, str] = {}
    yield found
    if not found:
        return
    width = max(map(len, found))
    print("\n\nmutations and what caught them first")
    for name, by in found.items():
        print(f"  {name:<{width}}  {by}")
    for mutation in MUTATIONS:
        if mutation.blind:
            print(f"  {mutation.name:<{width}}  not counted: {mutation.blind}")
    caught = sum(by != "SURVIVED" for by in found.values())
    ways = ", ".join(
        f"{count} by {way}" for way, count in Counter(by.split(":")[0] for by in found.values()).most_common()
    )
    print(f"  caught {caught} of {len(found)}: {ways}")


def report_on(mutation: Mutation) -> Report:
    """Of the mutated kernel: of ordinary rows alone where those already show it, as they mostly do."""
    mutation.apply(source_of(mutation.subject, Layout()).text)  # it must change something
    broken = kernel_of(mutation.subject, lenient(mutation))
    broken.device.timeout_s = HANGS_S  # type: ignore[attr-defined]
    try:
        report = validate(broken, quick=True, cases=("normal",))
        if report.ok:
            report = validate(broken, quick=mutation.quick, cases=None if mutation.quick else FULL_CASES)
    except FusegenError as error:  # a text that no longer compiles proves nothing of the checker
        pytest.fail(f"{mutation.name}: {error}")
    return report


def caught_by(report: Report) -> str:
    """The first case that failed, and how: the emulator's fault, or the comparison."""
    for case in report.cases:
        if not case.ok:
            kind = case.problem.split("\n")[0]
            return f"{'emulator' if kind.startswith('KernelFault') else case.name}: {kind[:110]}"
    return "SURVIVED"


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: f"{s.chain}-{s.cols}-{s.fits.__name__}-{s.target}")
def test_unbroken_kernels_pass(subject: Subject) -> None:
    validate(kernel_of(subject, lambda text: text), quick=True).raise_for_error()


@pytest.mark.parametrize("mutation", COUNTED, ids=lambda m: m.name.replace(" ", "-"))
def test_mutation_is_caught(mutation: Mutation, scores: dict[str, str]) -> None:
    report = report_on(mutation)
    scores[mutation.name] = caught_by(report)
    assert not report.ok, f"{mutation.name} survived: {mutation.models}\n{report}"


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.blind], ids=lambda m: m.name.replace(" ", "-"))
def test_blind_spots_are_real(mutation: Mutation) -> None:
    """A mutation that is excused must change the text, and still pass: once it is caught, it counts."""
    broken = kernel_of(mutation.subject, mutation.apply)
    assert validate(broken, quick=True).ok, f"{mutation.name} is caught by now; drop its excuse"


def test_there_are_enough_of_them() -> None:
    assert len(COUNTED) >= 25
    assert any(m.subject.target.startswith("hip") for m in COUNTED)
