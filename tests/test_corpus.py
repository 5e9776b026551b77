"""The corpus of chains after real fused kernels: nearly all are planned, and a few of them are run and judged.

`python -m tests.corpus --all` runs and judges every one.
"""

from __future__ import annotations

import random

import pytest

import fusegen
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.errors import NoPlan, SpecError
from fusegen.validation import validate
from tests.corpus import CASES
from tests.corpus.planning import planned

LEAST_SHARE = 0.95
ONCE_WRONG = ("grouped_scores",)  # nothing is left to compute behind what is one value a group
DRAWN = sorted({*random.Random(15).sample(sorted(CASES), 6), *ONCE_WRONG})


def test_nearly_every_chain_is_planned() -> None:
    refused: dict[str, str] = {}
    for case in CASES.values():
        try:
            planned(case)
        except (SpecError, NoPlan) as error:
            refused[case.name] = str(error)
    share = 1 - len(refused) / len(CASES)
    print(f"\n{share:.1%} of {len(CASES)} chains are planned", *refused.values(), sep="\n  ")
    assert len(CASES) >= 100
    assert share >= LEAST_SHARE, refused
    for said in refused.values():
        assert len(said.splitlines()[0]) < 300, said


@pytest.mark.parametrize("name", DRAWN)
def test_a_few_are_right(name: str) -> None:
    try:
        compiler()
    except EmulatorUnavailable as error:
        pytest.skip(f"no emulator: {str(error).splitlines()[0]}")
    made = fusegen.compile(CASES[name].traced(), "cuda:h200", on="emulator", validate=False)
    report = validate(made, quick=True)
    assert report.ok, report
