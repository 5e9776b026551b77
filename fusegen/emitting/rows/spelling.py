"""A row plan in the words of one dialect: what the templates print, in the order they print it.

Nothing is decided here. Whatever could be wrong is a field of the plan; this puts together the parts of a kernel's
text, each of which turns some fields into C++.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusegen.emitting.rows.blocks import Blocks
from fusegen.emitting.rows.bulk_rows import BulkRows
from fusegen.emitting.rows.elements import Elements
from fusegen.emitting.rows.frame import Frame
from fusegen.emitting.rows.in_turn import InTurn
from fusegen.emitting.rows.passes import Passes, SpelledPass
from fusegen.emitting.rows.persistent import Persistent
from fusegen.emitting.rows.prefetching import Prefetching
from fusegen.emitting.rows.reducing import Reductions, RowReduce
from fusegen.emitting.rows.scanning import searches
from fusegen.emitting.rows.vectors import Vectors
from fusegen.planner.model import Reduction, RowPass, RowPlan
from fusegen.planner.pieces import PIECE_BYTES


class Speller:
    """The parts of one plan's text. `found`: what is reduced by the prelude's functions; `pivoted`: as Reductions."""

    def __init__(
        self, plan: RowPlan, found: Iterable[Reduction] | None = None, pivoted: tuple[Reduction, ...] = ()
    ) -> None:
        every = (r for row_pass in plan.passes for r in (*row_pass.reductions, *searches(row_pass)))
        self.plan = plan
        self.frame = Frame(plan)
        self.words = self.frame.words
        self.vectors = Vectors(self.frame)
        self.blocks = Blocks(self.frame, self.vectors)
        self.bulk = BulkRows(self.frame)
        self.reductions = Reductions(self.frame, every if found is None else found, pivoted)
        self.elements = Elements(self.frame, self.vectors, self.bulk, self.reductions)
        self.passes = Passes(self.frame, self.vectors, self.blocks, self.bulk, self.reductions, self.elements)

    def context(self) -> dict[str, Any]:
        """What the templates see."""
        if self.plan.in_turn:
            said = InTurn(self.frame, self.vectors).context()
            return {**self.said(self.spelled(self.plan.passes), self.reductions.row_reduces()), **said}
        if not self.plan.persistent_rows:
            return self.said(self.spelled(self.plan.passes), self.reductions.row_reduces())
        persistent = Persistent(self.frame, self.vectors)
        passes = [
            (row_pass, persistent.twice(row_pass, spelled)) for row_pass, spelled in self.spelled(self.plan.passes)
        ]
        return {**self.said(passes, self.reductions.row_reduces()), **persistent.context()}

    def spelled(self, passes: Iterable[RowPass]) -> list[tuple[RowPass, SpelledPass]]:
        return [(row_pass, self.passes.spelled_pass(number, row_pass)) for number, row_pass in enumerate(passes, 1)]

    def said(self, passes: list[tuple[RowPass, SpelledPass]], reduces: list[RowReduce]) -> dict[str, Any]:
        """What every row kernel's template asks for, once its passes are spelled: the frame knows by then which of the
        prelude's functions they call."""
        plan, frame, words = self.plan, self.frame, self.words
        lanes = min(plan.tile.row_threads, plan.target.warp)
        keeps, in_remainder = self.vectors.keeps(), self.blocks.remainder_test()
        said: dict[str, Any] = {
            "index": frame.index,
            "row_reduces": reduces,
            "row_scans": self.passes.scans.row_scans(),
            "group_reduces": self.reductions.group_reduces(),
            "partners": list(dict.fromkeys(r.ctype if len(r.fields) == 1 else "float" for r in reduces)),
            "partner": words.spelling.shuffle_xor.format("v", "step"),
            "from_before": self.vectors.from_before(lanes),
            "piece": PIECE_BYTES,
            "lanes": lanes,
            "launch_body": words.statements(plan.launch_body),
            "tiling": {} if plan.flat else frame.tiling(),
            "live": plan.lacks_rows,
            "stands_in": plan.stands_in,
            "lane": frame.lane(),
            "lane_note": frame.lane_note(),
            "rows_product": frame.rows_product(),
            "row_indices": frame.row_indices(),
            "row_pointers": frame.row_pointers(),
            "row_values": [*map(frame.row_load, plan.row_loads), *frame.row_statements(plan.row_body)],
            "row_writes": frame.row_writes(plan.row_stores),
            "start": frame.start(),
            "start_name": "col" if frame.begins_at_column() else "start",
            "kept_shared": [
                {"type": t, "name": n, "at": frame.shared_at(n, offset)} for n, t, offset, _ in keeps if plan.in_shared
            ],
            "staged_shared": [] if plan.bulk else [*self.blocks.staged_rows(), *self.passes.tiles.shared()],
            "bulk_places": self.bulk.bulk_places(),
            "prefetched_shared": Prefetching(frame).prefetched_shared(),
            "contiguous_rows": plan.contiguous_rows,
            "leaves": any(spelled.leaves for _, spelled in passes),
            "kept_registers": [] if plan.in_shared else [
                {"type": t, "name": n, "dims": self.vectors.register_dims(vector)} for n, t, _, vector in keeps
            ],
            "col": frame.col(),
            "loops": frame.loops(),
            "guard": frame.guard(),
            "blocks_begin": self.blocks.head(),
            "cols": frame.cols,
            "row_size": frame.row_size if self.blocks.head() else "",
            "in_remainder": in_remainder,
            "vector_cols": frame.size("vector_cols", plan.vector_cols) if in_remainder else "",
            "begins_first": not (frame.begins_at_column() or all(row_pass.blocks_of for row_pass in plan.passes)),
            "whole": frame.whole(),
            "rest_elements": plan.cols % plan.tile.vector,
            "first_element": frame.first_element() if plan.flat else "",
            "passes": passes,
        }  # fmt: skip
        uses = {"vec": frame.uses_vec, "functions": words.functions}
        said["named_sizes"] = list(frame.sizes.values())
        return {**words.frame(plan), "includes": words.headers_of(a.dtype for a in plan.accesses), "uses": uses, **said}
