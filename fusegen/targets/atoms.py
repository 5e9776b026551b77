"""What the matrix units of a target do in one step: how large a product, who issues it, where its parts live and lie.

    H200.atoms_of("warpgroup", f16)    # wgmma.m64nNk16: factors from shared memory, sums in registers

A new unit is one more Atom in its target's file. One of tcgen05 is issued by a single thread, takes its left factor
from shared or from tensor memory, and leaves its sums in tensor memory; a Fragment says where they lie once a warp has
loaded them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from fusegen.language.types import DType, f32

F32_BITS = 24  # significant bits of an f32
Issuer = Literal["thread", "warp", "warpgroup"]
Home = Literal["registers", "shared memory", "tensor memory"]


@dataclass(frozen=True, slots=True)
class Term:
    """`of / div % mod * times`, where `of` is a lane's number or that of one of its elements; mod 0: all of it."""

    of: Literal["lane", "i"]
    div: int = 1
    mod: int = 0
    times: int = 1

    def value(self, i: int, lane: int) -> int:
        found = (lane if self.of == "lane" else i) // self.div
        return (found % self.mod if self.mod else found) * self.times

    def text(self, parts: tuple[tuple[str, int], ...]) -> str:
        """In C; element i is the sum of `parts`, each a variable and how much it counts, the most first. Empty for what
        none of them says."""
        name: str = self.of
        div, mod = self.div, self.mod
        if self.of == "i":
            found = next((place for place, (_, counts) in enumerate(parts) if self.div % counts == 0), None)
            if found is None:
                return ""
            name, counts = parts[found]
            div //= counts
            if found:  # the parts before count what the term cuts off
                if not mod or parts[found - 1][1] % (self.div * mod):
                    raise ValueError(f"{self} takes more of an element's number than {name}, one of {parts}")
                mod = 0 if parts[found - 1][1] == self.div * mod else mod
        return name + (f" / {div}" if div > 1 else "") + f" % {mod}" * (mod > 0) + f" * {self.times}" * (self.times > 1)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Which row and which column of a matrix element `i` of lane `lane` is, of those that a warp's registers hold.

    fragment.row(2, 5)                              # 9
    fragment.row_text(("n8", 4), ("r8", 2))         # "r8 * 8 + lane / 4": of element n8 * 4 + r8 * 2
    fragment.lanes_of_row                           # (1, 2): lanes that differ in these bits alone share their rows
    """

    rows: tuple[Term, ...]
    cols: tuple[Term, ...]
    lanes: int

    def row(self, i: int, lane: int) -> int:
        return sum(term.value(i, lane) for term in self.rows)

    def col(self, i: int, lane: int) -> int:
        return sum(term.value(i, lane) for term in self.cols)

    def row_text(self, *parts: tuple[str, int]) -> str:
        """Of an element, whose number is a sum of `parts`; without any, what the lane makes of it."""
        return " + ".join(filter(None, (term.text(parts) for term in self.rows)))

    def col_text(self, *parts: tuple[str, int]) -> str:
        return " + ".join(filter(None, (term.text(parts) for term in self.cols)))

    def own_col_text(self, *parts: tuple[str, int]) -> str:
        """How many columns an element is behind its lane's first one."""
        return " + ".join(filter(None, (term.text(parts) for term in self.cols if term.of == "i"))) or "0"

    @property
    def rows_apart(self) -> int:
        """How far a lane's second row is below its first; 0 where it has one."""
        return next((below for i in range(4) if (below := self.row(i, 0))), 0)

    def own_row_text(self, *parts: tuple[str, int]) -> str:
        """How many rows an element is below its lane's first one."""
        return " + ".join(filter(None, (term.text(parts) for term in self.rows if term.of == "i"))) or "0"

    @property
    def lane_cols(self) -> int:
        """Columns of which a lane's first element is one, over all lanes."""
        return self.lanes >> len(self.lanes_of_col)

    @property
    def lanes_of_four(self) -> int:
        """How many lanes have the same fours of neighbours in a row, from a multiple of 4 on, in each four elements of
        theirs: one; two, which have a half of one row's four and a half of another's; or 0, none."""
        places = [[(self.row(i, lane), self.col(i, lane)) for i in range(4)] for lane in (0, 1)]
        (row, col), (other, _) = places[0][0], places[0][2]
        if places[0] == [(row, col + j) for j in range(4)]:
            return 1
        halves = [[(r, col + 2 * lane + j) for r in (row, other) for j in (0, 1)] for lane in (0, 1)]
        return 2 if row != other and places == halves else 0

    @property
    def lanes_of_row(self) -> tuple[int, ...]:
        """Bits of a lane's number that its rows don't depend on: what reduces a row goes through them, one by one."""
        return alike(self.rows, self.lanes)

    @property
    def lanes_of_col(self) -> tuple[int, ...]:
        return alike(self.cols, self.lanes)


@cache
def alike(terms: tuple[Term, ...], lanes: int) -> tuple[int, ...]:
    """The bits of a lane's number that change none of `terms`."""
    own = [term for term in terms if term.of == "lane"]
    bits = [1 << place for place in range(lanes.bit_length() - 1)]
    return tuple(bit for bit in bits if not any(term.value(0, bit) for term in own))


@dataclass(frozen=True, slots=True)
class Atom:
    """sums += left @ right, of matrices that are `rows` x `k` and `k` x `cols`.

    `factors`: as which type they are stored; `other`: the right one, where it is another type. `word`: what the
    instruction, or the compiler's function for it, calls their elements, `other_word` the right one's; a compiler's
    function takes a vector of `lane_words` of them. Of `instructions`, which one fragment of the factors is for, each
    takes its part of K; `arguments` is what it is given, of the left factor {0}, the right one {1} and the sums {2}.
    `repeated`: each lane has all of K of its row, so that several lanes have the same. `sum_bits`: the significant bits
    of sums of floats while instructions add to them; whole numbers are summed in i32, exactly.
    """

    kind: Literal["mma", "mfma", "wmma", "wgmma", "tcgen05"]  # a family, whose kernels share a template
    instruction: str  # its own name, or that of the compiler's function
    factors: DType
    word: str
    rows: int
    cols: int  # at most,
    col_step: int  # in multiples of this
    k: int
    issuer: Issuer
    left: tuple[Home, ...]  # from where the left factor may come,
    right: tuple[Home, ...]  # and the right one
    sums: Home
    fragment: Fragment  # of the sums of one warp, in its registers,
    warps: int = 1  # of so many, each of which has rows of its own
    left_fragment: Fragment | None = None  # of a left factor that comes from registers, where kernels make it there
    instructions: int = 1
    lane_words: int = 1
    arguments: str = "{1}, {0}, {2}, 0, 0, 0"  # of AMD's functions, whose rows are the product's columns
    repeated: bool = False
    other: DType | None = None
    other_word: str = ""
    sum_type: DType = f32  # of a sum in registers
    sum_bits: int = F32_BITS

    @property
    def right_factors(self) -> DType:
        return self.other or self.factors

    @property
    def words(self) -> tuple[str, str]:
        """Of the left factor and of the right one."""
        return self.word, self.other_word or self.word

    @property
    def along_k(self) -> bool:
        """Must factors in shared memory lie along K? wgmma turns elements of 16 bits alone (PTX ISA, "wgmma.mma_async",
        imm-trans); tcgen05 turns f32 in another swizzle, which no kernel here has."""
        return self.factors.bytes != 2

    @property
    def threads(self) -> int:
        """That hold the sums, once these are in registers."""
        return self.warps * self.fragment.lanes

    @property
    def accumulators(self) -> int:
        """f32 values that each of them holds of a product `col_step` wide."""
        return self.rows * self.col_step // self.threads

    @property
    def shares_diagonals(self) -> bool:
        """Does a thread meet a diagonal in both of its rows: are these as far apart as columns of its own?"""
        apart = self.fragment.rows_apart
        return apart > 0 and apart % self.col_step == 0

    @property
    def warp_rows(self) -> int:
        """Rows of the sums that one warp holds."""
        return self.rows // self.warps
