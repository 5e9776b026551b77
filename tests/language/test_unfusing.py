"""Unfused, a chain computes what it does fused: by the reference texts, and by the pieces' kernels in the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.language.graph import Graph
from fusegen.language.reference import reference
from fusegen.language.spec import Chain, check_graph
from fusegen.language.types import size_of
from fusegen.language.unfusing import Piece, run_pieces, unfused
from fusegen.planner.cost import count_bytes, unfused_kernels
from fusegen.planner.rewrites import simplify
from fusegen.targets import target
from tests.chains import random_chain
from tests.language.test_products import ALL as PRODUCTS
from tests.language.test_products import bias_gelu, norm_swiglu
from tests.specs import ROWS
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

SPECS = tuple(ROWS.values())
B, M, N, K = dims("B M N K")


@chain(M=5, N=9)
def window(x: f16[M, N], width: f32) -> f16[M, N]:
    """A mask of positions alone, and a scalar that is worked on before it is used."""
    keep = (F.col_index(x) <= F.row_index(x)) & (F.col_index(x) > F.row_index(x) - 3)
    half = width * 0.5
    return F.softmax(F.where(keep, x * half, -float("inf")))


@chain(M=5, N=9)
def mean_by_hand(x: bf16[M, N], gain: f32[N]) -> tuple[bf16[M, N], f32[M, 1], bf16[M, N]]:
    """A size that meets values of one a row, an operand that comes back, mixed types."""
    mean = F.sum(x) / F.size(N)
    out = F.where(x > mean, x * gain, 0.0)
    return out, mean, x


@chain(M=4, N=6)
def flags(x: f32[M, N], mask: b8[N]) -> tuple[b8[M, N], f32[M, 1]]:
    """Booleans between operators and as a result; a name that the output takes too."""
    out = (x > 0) & mask
    return out, F.sum(F.where(out, x, 1.0))


@chain(M=5, N=9)
def wider_than_its_operands(x: f32[M, N], g: f32[N]) -> tuple[f32[M, N], f32[M, N]]:
    """A mask of positions on a row vector has rows that no operand of that operator has."""
    z = F.where(F.col_index(x) <= F.row_index(x), g, -1.0)
    top = F.max(x)
    return F.softmax(z + x), F.where(F.col_index(x) <= F.row_index(x), top, 0.0)


OWN = (window, mean_by_hand, flags, wider_than_its_operands)


@chain(M=5, N=24, K=7)
def best_of_softmax(x: f32[M, N], temperature: f32) -> tuple[f32[M, K], i32[M, K], f32[M, 1]]:
    """Renormalised probabilities of the k best, and what they were in sum."""
    likely, columns = F.topk(F.softmax(x / temperature), K)
    kept = F.sum(likely)
    return likely / kept, columns, kept


@chain(M=5, N=24)
def biased(x: f32[M, N], bias: f32[N], scale: f32[M, 1]) -> tuple[f32[M, 4], i32[M, 4]]:
    """Chosen by one score, weighed by another, of a vector that all rows share too."""
    score = F.sigmoid(x)
    _, columns = F.topk(score + bias, 4)
    weights = F.take(score, columns) * scale
    return F.softmax(weights + F.take(bias, columns)), columns


@chain(M=5, N=24)
def largest(x: f32[M, N]) -> tuple[i32[M, 1], f32[M, 1]]:
    return F.argmax(F.log_softmax(x)), F.max(x)


SELECTING = (best_of_softmax, biased, largest)


def small(found: Chain) -> Graph:
    """The same chain on a few rows."""
    sizes = dict(zip(found.graph.sizes, range(2, 9), strict=False))
    return found.graph.at(**{**sizes, str(found.graph.shape[-1]): 24})


def values_for(graph: Graph, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    made: dict[str, Any] = {}
    for tensor in graph.inputs:
        shape = [size_of(s, graph.sizes) for s in tensor.shape]
        if tensor.dtype is b8:
            made[tensor.name] = rng.random(shape) < 0.7
        elif tensor.dtype.kind == "int":
            made[tensor.name] = np.asarray(rng.integers(0, 9, shape), np.int32)[()]
        else:
            made[tensor.name] = np.asarray(rng.standard_normal(shape)).astype(tensor.dtype.numpy)[()]
    return made


def as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def by_reference(piece: Piece, operands: Sequence[Any]) -> Sequence[Any]:
    return as_tuple(reference(piece.graph)(*operands))


def check_by_reference(graph: Graph) -> None:
    pieces = unfused(graph)
    for piece in pieces:
        check_graph(piece.graph)
    values = values_for(graph)
    with np.errstate(all="ignore"):
        wanted = as_tuple(reference(graph)(*values.values()))
        found = run_pieces(pieces, values, by_reference)
    for tensor, law in zip(graph.outputs, wanted, strict=True):
        np.testing.assert_allclose(found[tensor.name], law, rtol=1e-9, atol=1e-12, err_msg=tensor.name)


@pytest.mark.parametrize("found", [*SPECS, *OWN, *SELECTING], ids=lambda c: c.name)
def test_pieces_mean_what_the_chain_means(found: Chain) -> None:
    check_by_reference(small(found))


@pytest.mark.parametrize("seed", range(150))
def test_pieces_of_random_chains(seed: int) -> None:
    check_by_reference(random_chain(seed).graph)


@pytest.mark.parametrize("found", [*SPECS, *SELECTING], ids=lambda c: c.name)
def test_pieces_are_the_kernels_that_costs_speak_of(found: Chain) -> None:
    """As many of them, and what each writes is what the cost model says an unfused chain writes."""
    graph = found.graph
    costs = unfused_kernels(graph)
    pieces = unfused(graph)
    assert len(pieces) == len(costs)
    for piece, cost in zip(pieces, costs, strict=True):
        own = piece.graph
        written = sum(count_bytes(graph, n, False) for n in cost.written)
        assert sum(count_bytes(own, t.node, False) for t in own.outputs) == written


@pytest.mark.parametrize("found", PRODUCTS, ids=lambda c: c.name)
def test_pieces_of_products_mean_what_the_chain_means(found: Chain) -> None:
    check_by_reference(found.graph)


def test_a_product_is_a_piece_with_its_view_and_its_factors_types() -> None:
    pieces = {p.operator: p for p in unfused(norm_swiglu.graph)}
    assert list(pieces) == ["rmsnorm", "matmul", "silu", "mul"], "two products, of one name"
    assert [str(t.type) for t in pieces["rmsnorm"].graph.outputs] == ["bf16[M, K]"]
    first = unfused(bias_gelu.graph)[0]
    assert [n.op.name for n in first.graph.nodes] == ["input", "input", "transpose", "matmul"]
    assert [str(t.type) for t in first.graph.outputs] == ["bf16[M, N]"]


def test_a_mask_of_positions_is_no_piece_and_no_operand() -> None:
    pieces = unfused(window.graph)
    assert [p.operator for p in pieces] == ["mul", "where", "softmax"]
    assert pieces[0].reads == ("x", "width")
    assert pieces[1].reads == ("mul",)


def test_storage_between_pieces_is_what_an_array_library_would_choose() -> None:
    types = {t.name: t.type for p in unfused(mean_by_hand.graph) for t in p.graph.outputs}
    assert {name: str(type) for name, type in types.items()} == {
        "sum_of_x": "bf16[M, 1]", "mean": "f32[M, 1]", "gt": "b8[M, N]", "mul": "f32[M, N]", "out": "bf16[M, N]",
        "out2": "bf16[M, N]",
    }  # fmt: skip


def test_a_selection_is_unfused_as_it_was_written() -> None:
    """However the planner turns it: softmax and selection are two kernels with the probabilities between them."""
    for graph in (best_of_softmax.graph, simplify(best_of_softmax.graph)):
        pieces = unfused(graph)
        assert [p.operator for p in pieces] == ["div", "softmax", "topk", "sum", "div"]
        assert pieces[2].reads == ("softmax",)
        assert set(pieces[2].writes) == {"columns", "likely"}
        assert unfused_kernels(graph)[2].per_element == 4 * 5 * (24 + 7 + 7)
        assert simplify(graph).at(M=6, N=30).written.sizes == {"M": 6, "N": 30, "K": 7}


def test_a_take_alone_reads_what_it_takes() -> None:
    takes = [k for k in unfused_kernels(biased.graph) if k.name.startswith("take")]
    assert [k.per_element for k in takes] == [4 * 5 * (4 + 4 + 4)] * 2  # columns, a value at each, the result
    assert [k.moved for k in takes] == [4 * 5 * (4 + 4 + 4), 4 * 5 * (4 + 4) + 4 * 4]
    assert [p.reads for p in unfused(biased.graph) if p.operator == "take"] == [
        ("score_plus_bias", "score"),
        ("score_plus_bias", "bias"),
    ]


@needs_compiler
@pytest.mark.parametrize("found", [*SPECS, *OWN], ids=lambda c: c.name)
def test_pieces_run_as_kernels(found: Chain) -> None:
    graph = small(found).with_dtype(f32)  # so that nothing is rounded between them
    values = values_for(graph)

    def run(piece: Piece, operands: Sequence[Any]) -> Sequence[Any]:
        kernel = fusegen.compile(piece.graph, target("cuda:h200"), on="emulator", validate=False)
        return as_tuple(kernel(*operands))

    wanted = as_tuple(reference(graph)(*values.values()))
    got = run_pieces(unfused(graph), values, run)
    for tensor, law in zip(graph.outputs, wanted, strict=True):
        assert got[tensor.name].dtype == tensor.dtype.numpy
        np.testing.assert_allclose(got[tensor.name], law, rtol=1e-4, atol=1e-5, err_msg=tensor.name)
