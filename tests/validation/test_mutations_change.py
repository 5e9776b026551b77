"""Every edit of a deliberately broken kernel still finds its place: in every run, as what it breaks goes by turns."""

from __future__ import annotations

from functools import cache
from itertools import chain

import pytest

from fusegen.planner.model import Layout
from tests import (
    attention_mutations,
    attention_wgmma_mutations,
    attention_wide_mutations,
    attention_wide_wgmma_mutations,
    gemm_mutations,
    mutations,
    rdna_mutations,
    weights_mutations,
)
from tests.mutations import Mutation

LISTS = {
    "mutations": mutations.MUTATIONS,
    "products": gemm_mutations.MUTATIONS,
    "attention": attention_mutations.MUTATIONS,
    "attention by wgmma": attention_wgmma_mutations.MUTATIONS,
    "wide attention": attention_wide_mutations.MUTATIONS,
    "wide attention by wgmma": attention_wide_wgmma_mutations.MUTATIONS,
    "written weights": weights_mutations.MUTATIONS,
    "RDNA": (*rdna_mutations.MUTATIONS, *rdna_mutations.PRODUCT_MUTATIONS, *rdna_mutations.ATTENTION_MUTATIONS),
}


@pytest.mark.always
@pytest.mark.parametrize("name", LISTS, ids=lambda name: name.replace(" ", "-"))
def test_every_edit_changes_its_kernel(name: str) -> None:
    text_of = cache(lambda subject: subject.source(Layout()).text)
    for mutation in LISTS[name]:
        mutation.apply(text_of(mutation.subject))


def test_an_edit_that_finds_nothing_is_told() -> None:
    first = next(chain.from_iterable(LISTS.values()))
    lost = Mutation("lost", "nothing", first.subject, (("no such text", ""),))
    with pytest.raises(AssertionError, match="lost: 'no such text' changes nothing"):
        lost.apply(first.subject.source(Layout()).text)
