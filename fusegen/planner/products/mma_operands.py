"""The operands of products by mma.sync, MFMA and WMMA: how each lies in memory, and how it gets into shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from fusegen.language.block_products import BLOCK
from fusegen.language.graph import Graph, Node
from fusegen.language.naming import value_names
from fusegen.language.products import Factor, Split
from fusegen.language.types import size_of
from fusegen.planner.matching import NoMatch
from fusegen.planner.model import Access, Layout, RowDim
from fusegen.planner.parts import Transport
from fusegen.planner.pieces import VECTOR_BYTES, stride_name
from fusegen.planner.products.factors import Use, access_of, line_of, uses, widest
from fusegen.planner.products.gemm import (
    GemmTile,
    chunk_of,
)
from fusegen.planner.products.output_groups import ProductDraft, ends_access, rows_at, segments_of
from fusegen.planner.products.parts import BlockScales, Coding, Operand

SEGMENT = "segment"  # the kernel's index of a group of rows
K_BEGIN = "k_begin"  # where a group of K begins
LEAST_COPY_BYTES = 4
DEEPEST_SLICE = 128  # of streams: elements of two bytes, or their codes
MOST_STREAMED_ROWS = 64  # rows: one slice-K group's sums fill its registers then


@dataclass(frozen=True)
class MmaDraft(ProductDraft):
    """What all tiles of one chain share."""

    accesses: Mapping[tuple[str, str], Access]  # by tensor, and by the place it is used in

    @cached_property
    def left(self) -> tuple[Operand, ...]:
        return left_factors(self)

    @cached_property
    def rights(self) -> Mapping[Node, Operand]:
        """The right factor of each product."""
        return right_factors(self)

    def block_scales(self) -> BlockScales | None:
        if not self.scaled:
            return None
        (rows,) = self.parts.products[0].scales[0].inputs
        cols = tuple(self.accesses[t.name, "scale"] for p in self.parts.products for t in p.scales[1].inputs)
        return BlockScales(BLOCK, self.accesses[rows.name, "left scale"], cols)

    @property
    def chunk(self) -> int:
        return chunk_of(self.dtype)

    @property
    def coding(self) -> Coding | None:
        return next(iter(self.rights.values())).coding

    @property
    def share(self) -> float:
        """Bits of a right factor's element by those of a left one's."""
        return next(iter(self.rights.values())).bits / self.dtype.bits if self.coding else 1.0

    @property
    def scales(self) -> float:
        """Of a column's 128 codes."""
        return 128 / (self.coding.group or self.k) if self.coding else 0.0

    def deep(self, tile: GemmTile) -> GemmTile:
        """The tile, whose k is in elements of two bytes, with as many bytes of the factors'."""
        return replace(tile, k=tile.k * 2 // self.dtype.bytes) if self.dtype.bytes != 2 else tile


def named_accesses(
    graph: Graph, dims: tuple[RowDim, ...], layout: Layout, parts: Split
) -> Mapping[tuple[str, str], Access]:
    """Each use of each tensor. One that is used in several ways has a name for each, and strides of its own."""
    names = value_names(graph)
    found = [use for use in uses(graph) if not passes_by(use, parts)]
    often = {use.tensor.name for use in found if sum(u.tensor is use.tensor for u in found) > 1}
    segments, inner = segments_of(graph, parts), parts.products[0].node.inner_ends
    groups = {p.right.scaled.scales: p.right.scaled.group for p in parts.products if p.right.scaled}
    made = {}
    for use in found:
        output = any(use.tensor is t for t in graph.outputs)
        name = use.tensor.name if output else names[use.tensor.node]
        if use.tensor.name in often and use.place != "tile":
            name = f"{name}_{use.place}"
        most = chunk_of(parts.products[0].left.dtype) * use.tensor.dtype.bytes
        if use.place == "right" and any(use.tensor in p.right.inputs for p in parts.products if p.right.scaled):
            most = VECTOR_BYTES  # codes are copied by 16 bytes, whatever type they are widened to
        alone = (
            use.place in ("scale", "left scale") or use.tensor.node in graph.grouped
        )  # one for a group, each by itself
        askew = segments and use.place == "left" and line_of(use, layout) != use.k_axis  # a group's first row is any
        askew = askew or (inner is not None and use.place != "tile" and line_of(use, layout) == use.k_axis)
        width = 1 if alone or askew else widest(graph, layout, use, most)
        if (group := groups.get(use.tensor)) and use.tensor.name not in layout.unaligned:
            # of codes, whose neighbouring groups are of one slice
            width = math.gcd(max(1, DEEPEST_SLICE // group), size_of(use.tensor.shape[-1], graph.sizes))
        access = access_of(graph, dims, layout, use, name, width)
        made[use.tensor.name, use.place] = replace(access, vector_bytes=min(access.vector_bytes, VECTOR_BYTES))
    if segments:
        made[segments.ends.tensor, "ends"] = segments.ends
    if inner is not None:
        made[graph.tensor_of[inner].name, "ends"] = ends_access(graph, inner)
    return made


def passes_by(use: Use, parts: Split) -> bool:
    """Is this what a statistic takes from the left operand as it passes?"""
    left = parts.lefts[0].operand
    read = {t.name for t in (*parts.inputs, *parts.graph.outputs)}
    return left is not None and use.place == "tile" and use.tensor is left and use.tensor.name not in read


def left_factors(drawn: MmaDraft) -> tuple[Operand, ...]:
    """What the left operand is computed from: itself, or the tensors [.., M, K] of its prologue."""
    left = drawn.parts.lefts[0]
    if left.operand is not None:
        use = next(u for u in uses(drawn.hoisted) if u.place == "left")
        tensors = [(left.operand.name, "left", use)]
    else:
        tensors = []
    known = {name for name, _, _ in tensors}
    if not tensors and not left.inputs:
        raise NoMatch(
            "the left factor is computed from values of its rows alone, where one column is multiplied; "
            "write x * w in place of x @ w"
        )
    for tensor in [*left.inputs, *(t for s in drawn.parts.statistics for t in s.inputs)]:
        rows = tensor.shape[-2:-1] == drawn.graph.shape[-2:-1]  # else a vector [K]
        if rows and tensor.name not in known:
            known.add(tensor.name)
            tensors.append((tensor.name, "tile", Use(tensor, "left")))
    found = []
    for name, place, use in tensors:
        access = drawn.accesses[name, place]
        line = access.line if place == "left" else -1
        copied = copies(drawn, access, line == use.k_axis) and access.dtype is drawn.dtype
        transport: Transport = "cp.async" if copied and len(tensors) == 1 else "plain"
        found.append(operand(drawn, access, "rows", line == use.k_axis, transport))
    if left.index is not None:
        tiles = {name: access for (name, place), access in drawn.accesses.items() if place == "tile"}
        found[0] = replace(found[0], rows_at=rows_at(drawn.hoisted, left, found[0].access, tiles))
    return tuple(found)


def right_factors(drawn: MmaDraft) -> Mapping[Node, Operand]:
    """The right factor of each product."""
    found = {}
    for product in drawn.parts.products:
        assert product.right.operand is not None
        access = drawn.accesses[product.right.operand.name, "right"]
        if product.right.scaled is not None:
            found[product.node] = coded(drawn, product.right, access)
            continue
        use = Use(product.right.operand, "right", product.right.transposed)
        transport: Transport = "plain"
        if copies(drawn, access, access.line == use.k_axis):
            transport = "cp.async evict-first" if read_once(drawn, access) else "cp.async"
        found[product.node] = operand(drawn, access, "cols", access.line == use.k_axis, transport)
    if len(drawn.groups) == 1:
        return found
    if len({f.along for f in found.values()}) > 1:
        found = {node: one_by_one(f) for node, f in found.items()}
    return alike(drawn, found)


def coded(drawn: MmaDraft, factor: Factor, access: Access) -> Operand:
    """A right factor of codes, of which 16 bytes are copied together where they begin at multiples of 16 bytes."""
    scaled = factor.scaled
    assert scaled is not None
    transport: Transport = "cp.async evict-first" if drawn.rows <= MOST_STREAMED_ROWS else "cp.async"
    if access.mode != "vector" or access.vector * access.dtype.bits != 8 * VECTOR_BYTES:
        transport = "plain"
    zeros = drawn.accesses[scaled.zeros.name, "scale"] if scaled.zeros else None
    coding = Coding(scaled.code, scaled.group, drawn.accesses[scaled.scales.name, "scale"], zeros, scaled.zero)
    return replace(operand(drawn, access, "cols", True, transport), coding=coding)


def one_by_one(f: Operand) -> Operand:
    """A right factor beside others that lie the other way round: an output group's strides say how its own lies."""
    stride, step = (f.stride, "1") if f.along else ("1", f.stride)
    return replace(f, along=True, tile_along=True, transport="plain", width=1, stride=stride, step=step)


def alike(drawn: MmaDraft, found: Mapping[Node, Operand]) -> Mapping[Node, Operand]:
    """Right factors of several output groups, which the same instructions bring: as few elements at a time as any of
    them allows, and along each batch axis that one of them moves along."""
    factors = found.values()
    width = min(f.width for f in factors)
    transport: Transport = "cp.async" if all(f.copied for f in factors) else "plain"
    if all(f.evict_first for f in factors):
        transport = "cp.async evict-first"
    indices = [SEGMENT] if drawn.segments else [K_BEGIN] if drawn.inner_segments else []
    indices += [
        dim.index for dim in drawn.dims[:-1] if any(dim.index == index for f in factors for index, _ in f.batch)
    ]
    return {
        node: replace(f, transport=transport, width=width, batch=tuple((i, dict(f.batch).get(i, "0")) for i in indices))
        for node, f in found.items()
    }


def read_once(drawn: MmaDraft, access: Access) -> bool:
    """Do all rows that a right factor is multiplied with pass by together?"""
    batches = range(len(drawn.dims) - 1)
    return (
        access.vector == drawn.chunk and drawn.rows <= MOST_STREAMED_ROWS and all(i in access.strided for i in batches)
    )


def copies(drawn: MmaDraft, access: Access, along: bool) -> bool:
    """Can asynchronous copies bring it as the tile has it? They move 4 bytes or more (PTX ISA, cp.async), and ldmatrix
    turns elements of 16 bits, none of 8."""
    whole = access.mode == "vector" and access.vector_bytes >= LEAST_COPY_BYTES
    return drawn.target.async_copies and whole and (along or not access.dtype.narrow)


def operand(drawn: MmaDraft, access: Access, mn: Literal["rows", "cols"], along: bool, transport: Transport) -> Operand:
    names = {t.name: value_names(drawn.hoisted)[t.node] for t in drawn.hoisted.inputs}
    last = len(drawn.dims) - 1
    batch = tuple((drawn.dims[i].index, stride_of(drawn, access, i)) for i in access.strided if i != last)
    if access.group_axis is not None:
        batch += ((SEGMENT, f"{access.name}_group"),)
    stride = f"{access.name}_ld" if access.ld_axis is not None else stride_of(drawn, access, last)
    if drawn.inner_segments:
        batch += ((K_BEGIN, "1" if along else stride),)
    return Operand(
        access=access,
        mn=mn,
        along=along,
        tile_along=along or not drawn.target.async_copies or access.dtype.narrow,
        transport=transport,
        width=access.vector if access.mode == "vector" else 1,
        pointer=f"{names[access.tensor]}_ptr",
        stride=stride,
        batch=batch,
    )


def stride_of(drawn: MmaDraft, access: Access, dim: int) -> str:
    return stride_name(access, drawn.dims, dim)
