"""Names that a spec may use and a kernel needs for itself: whatever an author calls a value, the two never meet."""

# mypy: disable-error-code="valid-type, arg-type, operator, no-any-return"

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from fusegen import chain, dims
from fusegen import ops as F
from fusegen.naming import (
    CPP,
    FACTOR_SUFFIXES,
    FRAME,
    PRODUCT_FRAME,
    RESERVED,
    SELECTION_FRAME,
    SIDE_BY_SIDE,
    SUM_SUFFIXES,
    TENSOR_SUFFIXES,
    VALUE_SUFFIXES,
    called,
    made_of,
    value_names,
)
from fusegen.planner import candidates
from fusegen.planner.model import Plan
from fusegen.rendering import render
from fusegen.spec import Chain
from fusegen.targets import Target
from fusegen.types import f16, f32, i32
from tests.specs import ALL
from tests.test_rendering import compiles

M, N = dims("M N")

# of loops in which nothing of a chain is read or computed
INNERMOST = frozenset(("b", "g", "q", "w", "key"))


@chain(M=3, N=4099)
def called_like_frames(
    store_row: i32, store: f16[M, N], own: f16[N], own_vec_next: f16[M, N]
) -> tuple[f16[M, N], f32[M, 1]]:
    """A zero \0, the end of a line \u2028 \x85 and half a letter \ud800 are no text of a comment."""
    load = F.softmax(store + own * own_vec_next) * store_row
    first = F.sum(store)
    return load, first


@chain(M=3, N=4099)
def called_like_picking(picked_sum: f16[M, N], read: f16[M, N]) -> tuple[f16[M, 8], i32[M, 8]]:
    picked_sum_vec = F.sum(read)
    picked_sum_vec_next = picked_sum_vec / 3
    see = picked_sum + picked_sum_vec_next
    ahead, passing = F.topk(see, 8)
    return ahead, passing


@chain(M=3, N=64)
def greek(ξ: f16[M, N]) -> tuple[f16[M, N], f32[M, 1]]:
    σ = F.softmax(ξ)
    return σ, F.max(ξ)


@pytest.mark.parametrize("spec", [called_like_frames, called_like_picking, greek], ids=lambda spec: spec.name)
def test_a_value_may_be_called_what_a_kernel_calls_its_own(spec: Chain, target: Target) -> None:
    for made in one_of_each(spec, target):
        compiles(made)
        opening = render(made).text.split("\n\n")[0]
        assert all(line.startswith("//") for line in opening.splitlines())


@pytest.mark.parametrize("spec", [called_like_frames, called_like_picking], ids=lambda spec: spec.name)
def test_no_name_is_what_a_kernel_makes_of_another(spec: Chain) -> None:
    graph = spec.graph
    names = value_names(graph)
    tensors = [*(names[t.node] for t in graph.inputs), *(t.name for t in graph.outputs)]
    every = {*names.values(), *tensors}
    assert not [(a, b) for a in every for b in tensors if made_of(a, b, TENSOR_SUFFIXES)]
    assert not {name + suffix for name in tensors for suffix in TENSOR_SUFFIXES} & FRAME


@pytest.mark.parametrize("spec", ALL.values(), ids=lambda spec: spec.name)
def test_a_kernel_keeps_its_own_words_from_the_spec(spec: Chain, target: Target) -> None:
    """Every word of a kernel's body is the spec's, made of one of the spec's, or one that the spec's step aside for."""
    for made in one_of_each(spec, target):
        graph = made.graph
        names = {*value_names(made.lowered).values(), *value_names(graph).values(), *(t.name for t in graph.outputs)}
        names |= {word for dim in made.row_dims for word in (dim.extent, dim.index)}
        names |= {SIDE_BY_SIDE} if graph.products else set()
        suffixes = TENSOR_SUFFIXES + VALUE_SUFFIXES + (FACTOR_SUFFIXES + SUM_SUFFIXES if graph.products else ())
        kept = CPP | FRAME | called() | {made.name} | INNERMOST
        kept |= (SELECTION_FRAME if graph.selections else set()) | (PRODUCT_FRAME if graph.products else set())
        loose = [
            word for word in sorted(words(render(made).text))
            if word not in kept and word not in names and not RESERVED.match(word)
            and not any(made_of(word, name, suffixes) for name in names)
        ]  # fmt: skip
        assert not loose, f"{made.rule} {made.configuration}: a value of such a name would meet the kernel's own"


def one_of_each(spec: Chain, target: Target) -> Iterator[Plan]:
    """The best plan of each way to hold and pick rows."""
    seen = set()
    for made in candidates(spec.graph, target).plans:
        way = re.sub(r"[\d/x]+", "", f"{made.rule} {made.configuration}"), made.cluster > 1
        if way not in seen:
            seen.add(way)
            yield made


def words(text: str) -> set[str]:
    """The identifiers of a kernel's body, but for what is a member of another."""
    body = text[text.rindex('extern "C"') + len('extern "C"') :]
    code = re.sub(r'//.*|#pragma.*|"[^"\n]*"', "", body)
    return set(re.findall(r"(?<![\w.>:])[A-Za-z_]\w*", code))
