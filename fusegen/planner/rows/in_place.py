"""Which operands an output may overwrite: those of which every element is read, for the last time, by the thread that
then writes it.

    a row kernel without a selection      an operand and an output of the whole shape and of one type
    by vectors or single elements         a thread then writes the very columns it reads; aligned blocks lie across
                                          columns of others, and so do bulk copies, which bring neighbours' bytes too;
                                          a variant by elements would have other bits
    no pass behind the writing one reads  a pass that does both reads each vector before it writes it

What a block fetches ahead is of other rows. The kernel for such operands is a variant: its pointers to them promise
nothing (`__restrict__` would let compilers read again, or later), and no thread reads another one's row as a stand-in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fusegen.planner.parts import Access, Param, RowPass

Pairs = frozenset[tuple[str, str]]  # (output, operand)


def overwritable(accesses: Iterable[Access], passes: Sequence[RowPass], dims: int, again: bool) -> Pairs:
    """The pairs that this order of reads and writes allows, however the tensors are read. `again`: is some of what is
    kept read from memory once more?"""
    found = list(accesses)
    return frozenset(
        (output.tensor, operand.tensor)
        for output in found
        for operand in found
        if output.output and not operand.output and alike(output, operand, dims)
        and read_before(output.tensor, operand.tensor, passes, again)
    )  # fmt: skip


def alike(output: Access, operand: Access, dims: int) -> bool:
    """Have both the chain's whole shape, and one type? Rows and columns that values name are read by other threads."""
    whole = all(access.by_column and len(access.walked) == dims for access in (output, operand))
    own = not (operand.anywhere or operand.gathered)
    return own and whole and output.shape == operand.shape and output.dtype is operand.dtype


def read_before(output: str, operand: str, passes: Sequence[RowPass], again: bool) -> bool:
    """Is the operand read by no pass behind the first that writes the output, and each element by its writer?"""
    writing = [n for n, row_pass in enumerate(passes) if any(s.access.tensor == output for s in row_pass.stores)]
    reading = [
        n for n, row_pass in enumerate(passes)
        if any(load.access.tensor == operand and (again or load.when != "kept") for load in row_pass.loads)
    ]  # fmt: skip
    return bool(writing) and max(reading, default=-1) <= writing[0]


def by_own_columns(pairs: Pairs, accesses: Iterable[Access], passes: Sequence[RowPass]) -> Pairs:
    """Those of `pairs` whose tensors every thread reads and writes in columns of its own."""
    modes = {access.tensor: access.mode for access in accesses}
    if any(row_pass.blocks_of for row_pass in passes):  # other threads' columns than those they read
        return frozenset()
    staged = {store.access.tensor for row_pass in passes for store in row_pass.stores if store.staged}
    staged |= turned(passes)
    own = {name for name, mode in modes.items() if mode in ("vector", "element") and name not in staged}
    return frozenset(pair for pair in pairs if own.issuperset(pair))


def turned(passes: Iterable[RowPass]) -> frozenset[str]:
    """The tensors whose elements other threads bring, or write, than those that make something of them."""
    found: set[str] = set()
    for row_pass in passes:
        found.update(load.access.tensor for load in row_pass.loads if load.transport == "turned")
        found.update(store.access.tensor for store in row_pass.stores if store.transport == "turned")
    return frozenset(found)


def promising_nothing(params: Iterable[Param], pairs: Pairs) -> tuple[Param, ...]:
    """The parameters, of which those in `pairs` may point to the same memory."""
    shared = {name for pair in pairs for name in pair}
    return tuple(replace(p, shared=True) if p.kind == "pointer" and p.tensor in shared else p for p in params)
