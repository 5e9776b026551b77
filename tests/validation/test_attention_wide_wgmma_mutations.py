"""The checker, checked on latent attention by wgmma: every broken kernel of attention_wide_wgmma_mutations.py must
fail."""

from __future__ import annotations

import pytest

from tests.attention_wide_wgmma_mutations import MUTATIONS
from tests.mutations import Mutation
from tests.validation.test_mutations import report_on


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_mutation_is_caught(mutation: Mutation) -> None:
    assert not mutation.blind, "none is excused here"
    report = report_on(mutation)
    assert not report.ok, f"{mutation.name} survived: {mutation.models}\n{report}"
