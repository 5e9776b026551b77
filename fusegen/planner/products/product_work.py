"""What the cost of a candidate for products of matrices is made from."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.language.types import DType
from fusegen.planner.products.gemm import GemmTile
from fusegen.targets.atoms import Atom


@dataclass(frozen=True, slots=True)
class ProductWork:
    """A tile of a chain, and what its time depends on."""

    tile: GemmTile
    atom: Atom
    dtype: DType  # of the factors
    products: int
    across: int  # tiles side by side
    k: int
    along: bool  # the right factors' neighbours in memory differ in k
    prepared: bool  # has the left operand a prologue?
    statistics: int
    evict_first: bool  # is the L2 told that the right factors are read once?
    askew: float  # how much longer lines of the factors take from the L2 cache
    narrow: float  # copies that bring what one of 16 bytes would
    elements: int  # that a thread loads one by one for each slice, where no copy can bring them
    counted: int  # chunks that a thread brings of a slice, and which may not be whole
    share: float = 1.0  # bits of a right factor's element by those of a left one's
    scales: float = 0.0  # of codes, of a column's 128
    by_group: bool = False  # is it of groups of rows, each multiplied by codes of its own?
    unscaled: int = 0  # sums of a slice that a thread has apart, until they are scaled
