"""What a plan of attention is made of, all frozen: its tile, bodies of scores and weights, ends, and what comes behind.

A block has some rows of queries and goes over the keys, a tile at a time:

    scores   query @ key^T, in registers
    logits   a body for each element: as the chain has it (`tested`), or with the conditions resolved that surely hold
             in the whole tile (`free`)
    carried  the largest logit of each row, and sums of exponentials against it, which shrink as it grows; without a
             softmax nothing, and logits are the weights
    product  += weights @ value, the weights from the registers that held the scores

Behind the last tile the sums go through shared memory, where each thread takes neighbouring columns of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fusegen.language.graph import Graph
from fusegen.language.types import DType
from fusegen.planner.attention.heads import of_head
from fusegen.planner.attention.masks import MOST_ROWS, Direction
from fusegen.planner.block_count import BlockCount
from fusegen.planner.model import Access, Body, Load, Plan, Statement
from fusegen.planner.parts import Argument, Transport, Value
from fusegen.targets.atoms import Atom

SUMS_PADDING_FLOATS = 4  # floats behind a row of sums: what a warp writes at once then lies in different banks
CHUNK = 8  # halves that move together: 16 bytes
LANE_KEYS = 4  # whose values a lane of an MFMA's wave reads together: 8 bytes
FEW_BANKS = 32  # of 4 bytes; CDNA 4 reads from 64


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """`rows` of queries of a block, `keys` of a tile, of which `stages` are in shared memory at a time. Each warp has
    `rows` / `warps` rows. `held`: the queries' fragments stay in registers. `ahead`: so does what comes by way of
    registers of the next tile; else it is read when its turn has come, as slow as that is."""

    rows: int
    keys: int
    warps: int
    stages: int
    held: bool
    ahead: bool = True


@dataclass(frozen=True, slots=True)
class Pages:
    """Of keys or values that lie in pages: row t is row t % `rows` of the page that `names` names at t // `rows`, of
    which it has `count`. A page that is not there is zeros."""

    names: Access
    rows: int
    count: int


@dataclass(frozen=True, slots=True)
class Counted:
    """A whole number, `value`, as f32 or i32, that moves by `step`, 1 or -1, from a column to the next: what `body`
    makes of a row and a column. `diagonal`: it moves back by as much from a row to the next, and a thread's rows are as
    far apart as columns of its own, so that one row's numbers are another's."""

    value: str
    body: tuple[Statement, ...]
    step: int
    diagonal: bool

    @property
    def dtype(self) -> DType:
        return self.body[-1].dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementBody(Body):
    """What is made of one element of a tile of scores, or of keys or values: `value`, of `given` among others.
    `counted`: values that are known of it by those of its thread's first column, floats where these are exact."""

    given: str
    value: str
    counted: tuple[Counted, ...] = ()


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of queries, keys or values, as they get into shared memory: `width` elements at a time, `columns` of them,
    in lines padded to whole fragments, `chunks` of 16 bytes from one line to the next. `across`: lines are columns.
    `banks`: of shared memory, where lanes of an MFMA's wave read; 0 elsewhere. `coded`: numbers of 8 bits, which become
    those of the factors' type on their way; `scaled`: by way of what is made of each and of values of its key, if any
    is."""

    access: Access
    transport: Transport
    width: int
    columns: int
    lines: int
    padded: int
    across: bool = False
    pages: Pages | None = None
    banks: int = 0
    coded: bool = False
    scaled: ElementBody | None = None

    @property
    def scales(self) -> tuple[Load, ...]:
        """What each key has one of, which is read with its codes."""
        return tuple(load for load in self.scaled.row_loads if load.access.ld_axis is not None) if self.scaled else ()

    @property
    def name(self) -> str:
        return self.access.name

    @property
    def copied(self) -> bool:
        return self.transport != "plain"

    @property
    def pitch(self) -> int:
        """Elements from one line to the next: an odd number of 16 bytes, so that what lanes read at once of 8 lines
        lies in different banks. An MFMA's lanes read 16 bytes of neighbours by fours, and 16 bytes further of the next
        ones: lines are twice an odd number apart. Of columns they read 8 bytes of 16 lines, or of all 64 banks at once
        of twice as many: an odd number of 8 bytes, or twice that."""
        chunks = (self.lines if self.across else self.padded) // CHUNK
        if self.banks and not self.across:
            return (chunks + (2 - chunks) % 4) * CHUNK
        if self.banks == FEW_BANKS:
            return self.lines + LANE_KEYS
        return (chunks | 1) * CHUNK

    @property
    def dealt(self) -> bool:
        """Of columns that an MFMA multiplies: are those that lie 8 apart lines beside each other, so that what lanes
        with neighbouring 16 bytes store at once lies in different banks? A fragment then has such columns."""
        return self.across and self.banks > 0

    @property
    def alternates(self) -> bool:
        """Do neighbouring fours of keys change places in every other 8 of these lines, as lines 8 apart meet in banks
        that are written?"""
        return self.dealt and self.banks > FEW_BANKS

    @property
    def elements(self) -> int:
        """In shared memory."""
        return (self.padded if self.across else self.lines) * self.pitch

    def held(self, threads: int) -> int:
        """Registers of each of so many threads that have brought it, for what is on its way."""
        codes = self.elements * self.access.dtype.bytes // (4 * threads)
        return codes + len(self.scales) * -(-self.lines * self.padded // (CHUNK * threads))


@dataclass(frozen=True, slots=True)
class Draw:
    """Random bits of scores, of which one call of Philox makes those of four neighbours: `value` of each, for `offset`
    and `seed`."""

    value: str
    offset: Argument
    seed: Argument

    @property
    def uses(self) -> frozenset[str]:
        return frozenset(a.name for a in (self.offset, self.seed) if isinstance(a, Value))


@dataclass(frozen=True, slots=True)
class EndText:
    """An end of an interval of keys: a sum of `terms`, values times numbers, and `plus`; or the least or most of
    some."""

    terms: tuple[tuple[str, int], ...] = ()
    plus: int = 0
    how: Literal["sum", "least", "most"] = "sum"
    of: tuple[EndText, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends(Body):
    """The keys that a row needs, `first` to `end`, and those of them that need no test. `direction`: whether what is
    known of a tile's first and last row is known of all of them."""

    first: EndText | None
    end: EndText | None
    free_first: EndText | None
    free_end: EndText | None
    direction: Direction

    @property
    def skips(self) -> bool:
        """Are there tiles of keys that no row needs?"""
        return self.first is not None or self.end is not None

    @property
    def settles(self) -> bool:
        return self.free_first is not None or self.free_end is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Behind(Body):
    """What is made of the sums, `vector` neighbouring columns at a time. `sums` names an element of the product; the
    row's largest logit is `top`, the sum of its exponentials `total`, empty where nothing asks for it. Where the
    chain's pivot is not the largest logit, `pivot_body` makes it, and sums are brought to it."""

    sums: str
    top: str
    total: str
    pivot: str
    pivot_body: tuple[Statement, ...]
    vector: int
    passes: int


@dataclass(frozen=True, kw_only=True)
class ScoresPlan(Plan):
    """A kernel whose blocks have some rows of queries and go over the keys, a tile of scores at a time."""

    attention: Graph  # as the kernel computes it
    tile: AttentionTile
    atom: Atom
    query: Matrix
    key: Matrix
    keys: int  # T
    dtype: DType  # of all factors
    launch_body: tuple[Statement, ...]  # once a thread
    row_loads: tuple[Load, ...]  # of the block's rows, before the first tile
    row_body: tuple[Statement, ...]
    tested: ElementBody
    free: ElementBody
    base_2: bool  # exponentials are powers of 2 of the logits as they are
    extreme: bool  # logits may be so large that a row has a factor of its own
    ends: Ends
    softmaxed: bool = True  # else weights are made of scores alone, and nothing of a row is carried
    parts: int = 0  # blocks, by the first of `row_dims`, to which tiles of keys are dealt; 0: each has all of them

    @property
    def lowered(self) -> Graph:
        return self.attention

    @property
    def configuration(self) -> str:
        """`attention 128x64 8 2`: rule, rows x keys, warps, stages; and where queries would take twice the registers,
        whether they stay there."""
        t = self.tile
        return f"{self.rule} {t.rows}x{t.keys} {t.warps} {t.stages}" + " unheld" * (self.atom.repeated and not t.held)

    @property
    def facts(self) -> Mapping[str, object]:
        t = self.tile
        return {"tile": {"rows": t.rows, "keys": t.keys, "warps": t.warps, "stages": t.stages, "held": t.held}}

    @property
    def head_values(self) -> frozenset[str]:
        """Of what is known of the block's rows before the first tile, that of which their head has one."""
        return of_head(self.row_loads, self.row_body, len(self.row_dims) - 1)

    @property
    def threads(self) -> int:
        return self.tile.warps * self.target.warp

    @property
    def cluster(self) -> int:
        return 1

    @property
    def rows_per_block(self) -> int:
        return self.tile.rows

    @property
    def static_shared_bytes(self) -> int:
        met = 4 * 4 * (self.threads // self.target.warp) if self.meets else 0
        return -(-met // self.shared_alignment) * self.shared_alignment

    @property
    def shared_alignment(self) -> int:
        """Of what follows the static shared memory, in bytes."""
        return 128

    @property
    def meets(self) -> bool:
        """Are ends found of all rows of a block, one a thread, and brought together?"""
        return bool(self.ends.direction == "any" and (self.ends.skips or self.ends.settles))

    @property
    def max_rows(self) -> int:
        """Tiles are counted in 32 bits; of products with one row each, every one takes a tile. Row numbers and what is
        added to them have 32 bits too."""
        return min(MOST_ROWS, self.max_blocks * (1 if self.row_dims[1:] else self.tile.rows))

    @property
    def block_count(self) -> BlockCount:
        return BlockCount(rows=self.tile.rows)

    @property
    def tiles(self) -> int:
        """Of keys that a block goes over, at most."""
        return -(-self.keys // (self.tile.keys * max(1, self.parts)))

    @property
    def ragged(self) -> bool:
        """Does the last tile of keys end beyond them?"""
        return self.keys % self.tile.keys != 0

    @property
    def longest_first(self) -> bool:
        """Are the tiles of a product's last rows taken first, which need the most keys, so that short ones fill the
        last wave? Of one product alone blocks follow their rows, as validation takes it of launches too large to
        hold."""
        return self.ends.direction == "up" and self.ends.end is not None and len(self.row_dims) > 1

    @property
    def tests(self) -> bool:
        """Are there tiles that have to be tested, and others that have not?"""
        return self.ragged or self.ends.settles or bool(self.free.counted)


@dataclass(frozen=True, kw_only=True)
class AttentionPlan(ScoresPlan):
    """Attention as one kernel."""

    value: Matrix
    weight: ElementBody
    draws: tuple[Draw, ...]  # for the weight, before it
    behind: Behind

    @property
    def widens(self) -> bool:
        """Do numbers of 8 bits become those of the factors' type on their way?"""
        return self.key.coded or self.value.coded

    @property
    def stage_elements(self) -> int:
        return self.key.elements + self.value.elements

    @property
    def query_at(self) -> int:
        """Elements from the start of shared memory to the queries: in the last stage's place, if they stay in registers
        from then on."""
        return self.stage_elements * (self.tile.stages - (1 if self.tile.held else 0))

    @property
    def sums_stride(self) -> int:
        return self.value.padded + SUMS_PADDING_FLOATS


def shared_bytes(tile: AttentionTile, dtype: DType, query: Matrix, key: Matrix, value: Matrix) -> int:
    """Dynamic shared memory: the ring and the queries, and in their place the sums and two values of each row."""
    stage = key.elements + value.elements
    ring = max(stage * tile.stages, stage * (tile.stages - (1 if tile.held else 0)) + query.elements)
    return max(ring * dtype.bytes, 4 * tile.rows * (value.padded + SUMS_PADDING_FLOATS + 2))
