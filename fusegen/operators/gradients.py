"""How a chain of gradients belongs to an operator, by the names of its operands and outputs."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.derivatives import DERIVED, derive
from fusegen.errors import RequestError
from fusegen.language.graph import Graph
from fusegen.language.spec import Chain


def chain_of_gradients(
    asking: str, chain: object, backward: object, gradients: Sequence[str]
) -> tuple[Chain | None, Sequence[str]]:
    """The backward chain of an operator, derived where that is asked for, and the operands that its outputs are the
    gradients of, where these do not say so. Raises RequestError for what are no chains."""
    derived = isinstance(backward, str) and backward == DERIVED
    for one in (chain, *(() if backward is None or derived else (backward,))):
        if not isinstance(one, Chain):
            raise RequestError(f"{asking} takes chains, and {DERIVED!r} for backward=; found {one!r}")
    assert isinstance(chain, Chain)
    if derived:
        return derive(chain, of=gradients or None), ()
    return backward if isinstance(backward, Chain) else None, gradients


class Gradients:
    """`wanted`: the backward chain's operands, each an operand or output of the forward chain or the gradient of an
    output. `made`: whose gradients its outputs are, as `d<operand>`.

    Raises RequestError where names don't fit; `name` is the operator's.
    """

    def __init__(self, name: str, forward: Graph, backward: Graph, gradients: Sequence[str]) -> None:
        self.name = name
        self.inputs = [t.name for t in forward.inputs]
        self.outputs = [t.name for t in forward.outputs]
        self.numbers = {t.name for t in forward.inputs if not t.shape}
        self.wanted = [t.name for t in backward.inputs]
        self.made = [f"d{one}" for one in gradients] or [t.name for t in backward.outputs]
        if len(self.made) != len(backward.outputs):
            raise RequestError(
                f"{name}: gradients names {len(self.made)} operands, and backward has {len(backward.outputs)} outputs"
            )
        known = [*self.inputs, *self.outputs, *(f"d{output}" for output in self.outputs)]
        tensors = [f"d{one}" for one in self.inputs if one not in self.numbers]
        if wrong := [one for one in self.wanted if one not in known]:
            raise RequestError(
                f"{name}: backward's operand {wrong[0]} is nothing that is at hand there\n  call it one of "
                + ", ".join(known)
            )
        if wrong := [one for one in self.made if one not in tensors]:
            raise RequestError(
                f"{name}: backward's output {wrong[0]} is the gradient of no operand\n  call its outputs "
                f"{', '.join(tensors)}, or name their operands, as in gradients=({tensors[0][1:]!r},)"
            )
