"""A Tcgen05Plan's parts in the words of CUDA and PTX: what templates/tcgen05.cu.j2 prints beside what wgmma's does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from fusegen.emitting.hopper import constraint_of
from fusegen.emitting.products.wgmma import EIGHT_LINES, SEGMENTS, WgmmaSpeller
from fusegen.planner.products.parts import Operand
from fusegen.planner.products.tcgen05 import ACCUMULATORS, Tcgen05Plan

# The fields of a shared memory descriptor that Hopper's has not, or elsewhere (PTX ISA, "Shared memory descriptor",
# table 40; CUTLASS, cute/arch/mma_sm100_desc.hpp, SmemDescriptor): bits 46-48 are 0b001, 61-63 the swizzle, 2 for 128
# bytes.
VERSION = ("version", "1ull << 46", "of such descriptors")
SWIZZLE_128 = ("swizzle_128", "2ull << 61", "pieces of 16 bytes are XOR-swizzled by their line")
MOST_LOADS = 16  # times 8 columns that one load brings: 64 registers


def behind(count: int) -> str:
    """So many sums or columns further on, counted by 64."""
    whole, rest = divmod(count, 64)
    terms = [f"{whole} * 64" if whole > 1 else "64"] * (whole > 0) + [str(rest)] * (rest > 0)
    return "".join(f" + {term}" for term in terms)


class Tcgen05Speller(WgmmaSpeller):
    """The words of one plan; `context()` is what the template sees."""

    plan: Tcgen05Plan
    chooses_sums: ClassVar[bool] = True

    def fields(self, *operands: Operand) -> list[tuple[str, str, str]]:
        return [VERSION, SWIZZLE_128, EIGHT_LINES, *([] if all(o.along for o in operands) else [SEGMENTS])]

    def factor(self, operand: Operand, mn: str) -> Mapping[str, Any]:
        return {
            "descriptor": self.descriptor(operand),
            "advance": self.advance(operand),
            "stage": f"({mn}_bytes / 16)",
        }

    def ways(self) -> list[Mapping[str, Any]]:
        """How right factors lie. Each way has an instruction descriptor and a main loop of its own."""
        across_left = [] if self.plan.left[0].along else [("1u << 15", "rows of the left factor next to each other")]
        found: list[Mapping[str, Any]] = []
        for way in super().ways():
            right_along = "segments" not in way["descriptor"]
            across = [] if right_along else [("1u << 16", "columns of the right factor next to each other")]
            fields = [*self.plan.instruction_fields, *across_left, *across]
            found.append(
                {
                    **way,
                    "instruction": fields,
                }
            )
        return found

    def multiplies(self) -> list[Mapping[str, Any]]:
        """The one function that asks for products."""
        atom = self.tile.atom
        pair = "; each block has half of the rows, and of the right factor's columns" if self.tile.pair else ""
        rows = atom.rows * self.tile.cluster
        return [{"kind": atom.word, "rows": rows, "cols": self.tile.cols, "k": atom.k, "pair": pair}]

    @property
    def sums(self) -> str:
        return "sums"

    def context(self) -> dict[str, Any]:
        return {**super().context(), "multiplies_here": "rank == 0 && " if self.tile.pair else ""}

    def tensor_memory(self) -> Mapping[str, Any] | None:
        """How a warp's part of a tile's sums gets to registers: the loads, each of so many columns, a power of 2."""
        loads = list(self.loads())
        widths = dict.fromkeys(times for _, _, times in loads)
        return {
            "columns": self.plan.tile.columns,
            "accumulators": ACCUMULATORS,
            "barriers": self.plan.tile.barriers,
            "cols": self.plan.tile.cols,
            "loads": [
                {"cols": 8 * times, "to": behind(at // 2), "from": behind(column)} for at, column, times in loads
            ],
            "given": "arrive_in(taken + 8 * own, 0)" if self.tile.pair else "arrive_at(taken + 8 * own)",
            "functions": [self.load_function(times) for times in widths],
            "part": f"i * ({self.plan.tile.part_rows} << 16)",
            "last": self.plan.tile.parts - 1,
            "lanes": self.plan.tile.atom.warp_rows,
        }

    def loads(self) -> Iterator[tuple[int, int, int]]:
        """Of each load the first column among the products' side by side, that in tensor memory, and how many times 8
        it brings."""
        for at, column, cols in self.stretches():
            done, rest = 0, cols // 8
            while rest:
                times = min(MOST_LOADS, 1 << rest.bit_length() - 1)
                yield at + done, column + done, times
                done, rest = done + 8 * times, rest - times

    def stretches(self) -> Iterator[tuple[int, int, int]]:
        """Columns that lie next to each other among the products' and in tensor memory: there a pair's are the first
        block's of all products, and then the second one's."""
        plan, tile = self.plan, self.tile
        if not tile.pair or plan.products == 1:
            yield 0, 0, tile.cols
            return
        own = plan.width // tile.cluster
        for product in range(plan.products):
            for block in range(tile.cluster):
                yield product * plan.width + block * own, block * (tile.cols // tile.cluster) + product * own, own

    def load_function(self, times: int) -> Mapping[str, Any]:
        count, letter = 4 * times, constraint_of(self.tile.atom)
        rows = [range(first, min(first + 16, count)) for first in range(0, count, 16)]
        fours = [range(first, first + 4) for first in range(0, count, 4)]
        return {
            "times": times,
            "cols": 8 * times,
            "count": count,
            "registers": [", ".join(f"%{i}" for i in row) + (", " if row.stop < count else "") for row in rows],
            "outputs": [
                ", ".join(f'"={letter}"(sums[{i}])' for i in four) + ("," if four.stop < count else "")
                for four in fours
            ],
            "from": f"%{count}",
        }
