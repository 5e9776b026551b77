"""The checker, checked on attention: every broken kernel of attention_mutations.py and attention_wide_mutations.py must
fail validation."""

from __future__ import annotations

import pytest

from fusegen.validation import validate
from tests import attention_mutations, attention_wide_mutations
from tests.attention_mutations import AttentionSubject
from tests.mutations import Mutation
from tests.validation.test_mutations import kernel_of, report_on

MUTATIONS = (*attention_mutations.MUTATIONS, *attention_wide_mutations.MUTATIONS)
SUBJECTS = tuple(dict.fromkeys(m.subject for m in MUTATIONS))


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: f"{s.chain}-{s.target}")
def test_unbroken_kernels_pass(subject: AttentionSubject) -> None:
    validate(kernel_of(subject, lambda text: text), quick=True).raise_for_error()  # type: ignore[arg-type]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_mutation_is_caught(mutation: Mutation) -> None:
    assert not mutation.blind, "none is excused here"
    report = report_on(mutation)
    assert not report.ok, f"{mutation.name} survived: {mutation.models}\n{report}"
