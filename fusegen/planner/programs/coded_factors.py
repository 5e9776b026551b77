"""Factors of attention that numbers of 8 bits are made, by casts and by scales of each key: as these lie in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from fusegen.language.graph import Kind, Node
from fusegen.language.sizes import Shape, broadcast
from fusegen.language.views import View
from fusegen.planner.attention.codes import codes_of
from fusegen.planner.programs.pages import Paged, paged_in
from fusegen.planner.programs.seen import across, turned_round


class Seeing(Protocol):
    """The nodes of a step while it is made: what views show of a chain's values."""

    def seen(self, node: Node, view: View, full: bool = False) -> Node: ...
    def factor(self, node: Node, view: View, of: Node) -> Node: ...
    def pages(self, of: Paged) -> Node: ...
    def composed(self, view: View, other: View, node: Node) -> View: ...


def made_of_codes(step: Seeing, node: Node, view: View, of: Node) -> Node | None:
    """What `view` shows of a factor that is made of codes, or shows some, as these lie; None where what meets them has
    other than one value for each of their rows, or more rows than they."""
    codes = codes_of(node)
    assert codes is not None
    if node.view is not None:
        return step.factor(codes, step.composed(view, node.view, node), of)
    inner = step.factor(codes, view, of)
    turned = inner.op.kind is Kind.TRANSPOSE
    rows = inner.inputs[0] if turned else inner
    first = (across(view) if turned else view).sliced((..., slice(0, 1)))
    arguments = tuple(rows if a is codes else of_rows(step, a, node, first) for a in node.inputs)
    if any(a is not rows and a.shape[-1:] not in ((), (1,)) for a in arguments) or spanned(arguments) != rows.shape:
        return None
    made = replace(node, inputs=arguments, shape=rows.shape)
    return turned_round(made, inner.operator) if turned else made


def of_rows(step: Seeing, node: Node, user: Node, view: View) -> Node:
    """What meets codes, as what `view`, of the first column of `user`, shows of it."""
    if node.op.kind is Kind.MAP:
        arguments = tuple(of_rows(step, a, user, view) for a in node.inputs)
        return replace(node, inputs=arguments, shape=spanned(arguments))
    own = step.composed(view, View.identity(node.shape).broadcast(user.shape), node)
    pages = paged_in(node, own)
    return step.pages(pages) if pages else step.seen(node, own)


def spanned(arguments: tuple[Node, ...]) -> Shape:
    """The shape of what is made of them, element by element."""
    shape: Shape = ()
    for argument in arguments:
        shape = broadcast(shape, argument.shape)
    return shape
