"""A plan of products that nothing renders: what the launcher and the checks need to know of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusegen.language.graph import Graph
from fusegen.language.naming import entry_name
from fusegen.planner.block_count import BlockCount
from fusegen.planner.model import Cost, Layout, Plan, Traffic
from fusegen.planner.products.factors import access_of, product_dims, product_params, uses, widest
from fusegen.planner.rewrites import hoist_scales, simplify
from fusegen.targets import H200, Target

NOTHING = Cost(Traffic((), 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0), 0.0, 0.0, "memory", 0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class Sketch(Plan):
    """Blocks of 16 rows and all columns."""

    hoisted: Graph

    @property
    def lowered(self) -> Graph:
        return self.hoisted

    @property
    def configuration(self) -> str:
        return self.rule

    @property
    def facts(self) -> Mapping[str, object]:
        return {}

    @property
    def threads(self) -> int:
        return 128

    @property
    def cluster(self) -> int:
        return 1

    @property
    def rows_per_block(self) -> int:
        return 16

    @property
    def static_shared_bytes(self) -> int:
        return 0

    @property
    def max_rows(self) -> int:
        return self.max_blocks * 16

    @property
    def block_count(self) -> BlockCount:
        return BlockCount(rows=16)


def sketch(graph: Graph, layout: Layout | None = None, target: Target = H200) -> Sketch:
    """The operands of `graph` as a rule would have them read."""
    layout = layout or Layout()
    graph = simplify(graph)
    hoisted = hoist_scales(graph)
    dims = product_dims(hoisted, layout)
    accesses = []
    for use in uses(hoisted):
        name = use.tensor.name + ("_right" if use.place == "right" else "")
        accesses.append(access_of(hoisted, dims, layout, use, name, widest(hoisted, layout, use)))
    return Sketch(
        name=entry_name(graph), graph=graph, hoisted=hoisted, target=target, layout=layout, rule="sketch", template="",
        regime="a sketch", cols=graph.cols, row_dims=dims, accesses=tuple(accesses),
        params=product_params(hoisted, dims, accesses), folded=False, shared_bytes=0, cost=NOTHING,
    )  # fmt: skip
