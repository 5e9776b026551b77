"""What reads at counted rows and columns cost: at numbers that are arithmetic on the kernel's own.

`programs.shifts` makes shifts such reads.

The constants are fitted to causal convolutions by four taps in bf16 (one run on an H200, medians of 15 with a cold L2):
8 candidates of 2 x 4096 x 4096 by rolls, 8 along the last axis, and what was the first choice of 13 other chains and
shapes, all of which are predicted to 12 %; registers to those of NVRTC 13. Three of rows that lie turned round took a
fifth to a quarter less than is expected, and a step of 64 rows of 4096 columns with a state in front 6.0 us for 3.8. Of
kernels in several passes nothing is measured, and their registers are taken for those of other kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusegen.language.graph import Graph, behind, once_per_graph
from fusegen.language.types import size_of
from fusegen.planner.model import Access, Tile

# Of the registers that reads wait in elsewhere. Where a block has several rows, NVRTC 13 has most vectors read where
# they are used: a thread of the convolution by rolls has 40 registers, with a state in front 51. Where it has one, each
# case of missing rows is code of its own, with vectors of its own: 72 and 90. So 128 threads on a row, of which an SM
# holds seven blocks, took 68.6 us by rolls, 256 76.1 and 512, of which it holds one, 109.5; 64 threads on each of two
# rows took 62.9, on each of four 63.6.
REGISTERS_SHARE = 0.55
REGISTERS_ALONE_SHARE = 1.44
# Instructions of an element beside those of other reads, where a block has several rows: its reads are tested one by
# one, and 600 instructions stand in the kernel by rolls for 8 elements, of which 290 are expected without these.
ROW_SLOTS = 6.0
FEW_SLOTS = 3.0  # where few rows have something to be read, and whole warps pass over it
# Of an element that is read by itself, at the number of its column: it is tested, found and converted alone, and the
# lanes of a warp ask for elements 16 bytes apart, which lie in four lines. Along the last axis 256 threads on four rows
# took 95.8 us, on one 103.1; 848 and 943 instructions stand there.
COLUMN_SLOTS = 22.0
COLUMN_ALONE_SLOTS = 25.0
FEW_SHARE = 0.25  # of rows, for which fewer are passed over by whole warps


@once_per_graph
def counted(graph: Graph) -> Mapping[str, float]:
    """The operands that are read at counted indices, and of these the share at which they have something."""
    found: dict[str, float] = {}
    for node in graph.gathers:
        table, index = node.inputs[:2]
        if table in graph.tables and not any(value in graph.tensor_of for value in behind((index,))):
            rows, places = (
                size_of(table.shape[0], graph.sizes),
                max((size_of(s, graph.sizes) for s in index.shape), default=1),
            )
            found[graph.tensor_of[table].name] = min(1.0, rows / max(1, places))
    return found


def registers_share(accesses: Iterable[Access], shares: Mapping[str, float], tile: Tile) -> float:
    """Of the registers that the reads of a kernel in one pass wait in where none is at a counted row."""
    if not any(access.tensor in shares and access.by_column for access in accesses):
        return 1.0
    return REGISTERS_SHARE if tile.rows_per_block > 1 else REGISTERS_ALONE_SHARE


def counted_slots(accesses: Iterable[Access], shares: Mapping[str, float], tile: Tile) -> float:
    """Instructions of an element for what is read at counted indices, beside those of other reads."""
    several = tile.rows_per_block > 1
    found = 0.0
    for access in accesses:
        if access.tensor not in shares:
            continue
        if shares[access.tensor] < FEW_SHARE:
            found += FEW_SLOTS if several else 0.0
        elif access.by_column:
            found += ROW_SLOTS if several else 0.0
        else:
            found += COLUMN_SLOTS if several else COLUMN_ALONE_SLOTS
    return found
