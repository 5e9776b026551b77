"""What a plan of written weights is made of: softmax(scores) as an array, whose scores are never in memory.

A block has some rows of queries and goes over the keys twice. The first pass carries each row's largest logit and the
sum of its exponentials; the second one makes the scores again, and of each what is written. Where a mask leaves nothing
of a tile, neither pass makes scores, and what an exponential of -inf gives is written there.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusegen.language.types import DType
from fusegen.planner.attention.parts import AttentionTile, Matrix, ScoresPlan
from fusegen.planner.model import Body, Statement


@dataclass(frozen=True, kw_only=True, slots=True)
class Results(Body):
    """What is made of each score in the second pass. `exps` names its exponential, empty where nothing asks for it;
    the row's largest logit is `top`, the sum of its exponentials `total`, empty where nothing asks for it. Where the
    chain's pivot is not the largest logit, `pivot_body` makes it. `free_body`: the body with the conditions resolved
    that hold in tiles that need no test. `by_row`: results are the same wherever a logit is -inf."""

    exps: str
    top: str
    total: str
    pivot: str
    pivot_body: tuple[Statement, ...]
    free_body: tuple[Statement, ...]
    by_row: bool


@dataclass(frozen=True, kw_only=True)
class WeightsPlan(ScoresPlan):
    """Written weights as one kernel."""

    results: Results

    @property
    def stage_elements(self) -> int:
        return self.key.elements

    @property
    def query_at(self) -> int:
        """Elements from the start of shared memory to the queries: in the last stage's place, if they stay in registers
        from then on."""
        return self.stage_elements * (self.tile.stages - (1 if self.tile.held else 0))


def shared_bytes(tile: AttentionTile, dtype: DType, query: Matrix, key: Matrix) -> int:
    """Dynamic shared memory: the ring and the queries."""
    stages = tile.stages - (1 if tile.held else 0)
    return max(key.elements * tile.stages, key.elements * stages + query.elements) * dtype.bytes
