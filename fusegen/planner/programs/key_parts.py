"""Attention of few queries to many keys as two kernels: one that makes parts of it, and one that brings them together.

    s [.., S, T] = q @ k.mT;  top = max(s);  e = exp(s - top);  total = sum(e);  o = (e @ v) / total
    top_parts, total_parts [P, .., S, 1], o_parts [P, .., S, D]: the same of the tiles of keys p, p + P, ... of each p
    top = max over P of top_parts;  w = exp(top_parts - top)
    total = sum over P of total_parts * w;  o = (sum over P of o_parts * w) / total

A block of attention has the queries of one head, or of heads that share keys, and goes over all of their keys: of 8
heads of keys, as a token is decoded, 8 blocks. Parts make as many of them as a GPU has places. Keys are dealt a tile at
a time, so that parts stay alike where a sequence has filled few of its slots, whatever their number. A part that has
none of a row's keys leaves -inf, and zeros; a row that has none at all is what the chain makes of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fusegen.language.graph import Graph, Kind, Node, Operator, Tensor
from fusegen.language.naming import free_name, value_names
from fusegen.language.products import Unsplittable
from fusegen.language.reference import draws
from fusegen.language.sizes import replaced
from fusegen.language.trace import OPS
from fusegen.language.types import Shape, TensorType, b8, f32, size_of
from fusegen.language.views import View
from fusegen.planner.attention.recognition import Recognized, is_attention, is_wide, recognized
from fusegen.planner.programs.column_parts import Parted, restricted
from fusegen.planner.programs.lowering import lowered
from fusegen.planner.programs.model import Stored
from fusegen.planner.programs.steps import Bound, Lowered, NotOneStep
from fusegen.targets.base import Target

FEW_ROWS = 64  # queries of a head, or of heads that share keys, at most: more of them are blocks enough
FEW_WIDE_ROWS = 512  # of long rows: all heads share a row of latent keys, of one token or of a few drafted ones
WIDE_ROWS = 64  # of them in a block
# keys of a tile: for wgmma, and of 16 queries each for mma.sync and for MFMA; and of long rows
WGMMA_TILES, COPIED_TILES, TILES, WIDE_TILES = (128, 64), (64,), (32,), (64, 32)  # the last of 8 bits too
BLOCKS_AN_SM, CODED_BLOCKS_AN_SM = (0.5, 1, 2, 4), (2, 4, 8)  # those that widen numbers of 8 bits are small
FEW_PARTS = (2, 4)
# of a part, of keys that are too few for a GPU's places: without copies past the registers a tile takes microseconds
FEW_TILES = (1, 2)


def keys_parted(step: Lowered, target: Target, dealt: tuple[int, int] | None = None) -> Iterator[Parted]:
    """The step as two kernels, for each tile of keys and number of parts that may be worth it, or for those `dealt`;
    none for what is no attention of few queries, draws random numbers, or counts behind the second product."""
    graph = step.graph
    if not is_attention(graph) or graph.deals or draws(graph) or size_of(graph.shape[-2], graph.sizes) > FEW_WIDE_ROWS:
        return
    try:
        found = recognized(graph)
    except Unsplittable:
        return
    wide = is_wide(found)
    if size_of(graph.shape[-2], graph.sizes) > FEW_ROWS and not wide:
        return
    behind = (*found.epilogue, *found.between(found.pivot, (found.top,)))
    if any(n.op.kind is not Kind.MAP and n.op.name != "literal" and n.op.kind is not Kind.INPUT for n in behind):
        return
    keys, small = size_of(found.keys, graph.sizes), bool(found.coded) and target.async_copies
    numbers = [dealt] if dealt else numbers_of_parts(graph, keys, target, wide, small)
    for tile, parts in numbers:
        try:
            yield Halves(step, found, tile, parts).result()
        except NotOneStep:
            return


def numbers_of_parts(
    graph: Graph, keys: int, target: Target, wide: bool = False, small: bool = False
) -> Iterator[tuple[int, int]]:
    """Keys of a tile, and parts: as many as give a GPU so many blocks for each SM, and a few; each has as many tiles as
    another or one less. `small`: blocks are, as those that widen numbers of 8 bits."""
    heads = max(1, math.prod(size_of(size, graph.sizes) for size in graph.shape[:-2]))
    if wide:
        heads *= -(-max(1, size_of(graph.shape[-2], graph.sizes)) // WIDE_ROWS)
    narrow = WGMMA_TILES if target.wgmma else COPIED_TILES if target.async_copies else TILES
    for tile in WIDE_TILES if wide or small else narrow:
        count = -(-keys // tile)
        wanted = {int(target.sms * each / heads) for each in (CODED_BLOCKS_AN_SM if small else BLOCKS_AN_SM)}
        wanted |= set(FEW_PARTS)
        if not target.async_copies:
            wanted |= {-(-count // tiles) for tiles in FEW_TILES}
        for parts in sorted({-(-count // -(-count // parts)) for parts in wanted if 1 < parts <= count}):
            yield tile, parts


class Halves:
    """Both kernels' graphs, while they are made."""

    def __init__(self, step: Lowered, found: Recognized, tile: int, parts: int) -> None:
        self.step, self.found, self.tile, self.parts = step, found, tile, parts
        self.graph = found.lowered
        self.keys = size_of(found.keys, self.graph.sizes)
        self.names = value_names(self.graph)
        self.taken = {t.name for t in (*self.graph.inputs, *self.graph.outputs)} | set(self.names.values())

    def result(self) -> Parted:
        made = self.of_parts()
        outputs = tuple(self.stored(self.name_of(node), new) for node, new in made.items())
        named = {new: self.names[node] for node, new in {**made, self.found.exps: self.exps}.items()}
        graph = replace(self.graph, name=self.stem, names={**self.graph.names, **named})
        first = restricted(replace(self.step, graph=graph), outputs, (), {})
        why = f"each of {self.parts} parts, which are dealt {self.tile} keys at a time, leaves what it has of a row"
        between = tuple(Stored(t.name, self.in_chain(t), "workspace", t.node, why) for t in outputs)
        return Parted(first, self.together(dict(zip(made, outputs, strict=True))), between)

    def in_chain(self, tensor: Tensor) -> TensorType:
        """The type of a tensor in the chain's sizes, of which the step's may be computed."""
        return TensorType(f32, tuple(replaced(size, self.step.sizes) for size in tensor.shape))

    @property
    def stem(self) -> str:
        """What both kernels' names begin with."""
        return self.graph.name.removesuffix(f"_{self.graph.outputs[0].name}")

    def name_of(self, node: Node) -> str:
        """Of the product, what becomes of it; a value's own name."""
        results = [t.name for t in self.graph.outputs if t.node.shape == node.shape]
        return results[0] if node is self.found.product and len(results) == 1 else self.names[node]

    def stored(self, name: str, node: Node) -> Tensor:
        name = free_name(f"{name.rstrip('_')}_parts", self.taken)
        self.taken.add(name)
        return Tensor(name, TensorType(f32, node.shape), node)

    # ---- the kernel of parts

    @property
    def part(self) -> str:
        """Numpy text: to which part each column is dealt."""
        return f"np.arange({self.keys}) // {self.tile} % {self.parts}"

    @property
    def own(self) -> str:
        """Numpy text: which columns part `p` is dealt."""
        return f"{self.part} == p"

    def dealt(self, name: str, text: str, like: Node, shape: Shape, *inputs: Node) -> Node:
        return Node(OPS[name], inputs, shape, f32, like.operator, group=self.tile, count=self.parts, text=text)

    def of_parts(self) -> Mapping[Node, Node]:
        """What each part leaves of the product, of the largest logit, and of the sum of exponentials."""
        found = self.found
        logits, rows = found.logits, found.top.shape
        each = f"np.stack([{{}} for p in range({self.parts})])"
        top = self.dealt(
            "deal_max", each.format(f"{{0}}[..., {self.own}].max(-1, keepdims=True)"), found.top, (self.parts, *rows),
            logits,
        )  # fmt: skip
        by = found.exps.operator
        low, zero = (Node(OPS["literal"], (), (), f32, by, literal=number) for number in (-math.inf, 0.0))
        nothing = Node(OPS["eq"], (top, low), top.shape, b8, by)
        pivot = Node(OPS["where"], (nothing, zero, top), top.shape, f32, by)
        back = f"np.moveaxis({{0}}[..., 0], 0, -1)[..., {self.part}]"
        spread = self.dealt("deal_back", back, found.exps, logits.shape, pivot)
        below = Node(OPS["sub"], (logits, spread), logits.shape, f32, by)
        table = {found.exps: replace(found.exps, inputs=(below,))}
        for node in found.weight_body:
            if node.inputs and node is not found.exps:
                table[node] = replace(node, inputs=tuple(table.get(a, a) for a in node.inputs))
        self.exps = table[found.exps]
        text = f"{{0}}[..., {self.own}] @ {{1}}[..., {self.own}, :]"
        product = self.dealt(
            "deal_matmul", each.format(text), found.product, (self.parts, *found.product.shape),
            table[found.weights], found.product.inputs[1],
        )  # fmt: skip
        made: dict[Node, Node] = {found.product: product, found.top: top}
        if found.total is not None:
            text = each.format(f"{{0}}[..., {self.own}].sum(-1, keepdims=True)")
            made[found.total] = self.dealt("deal_sum", text, found.total, (self.parts, *rows), self.exps)
        return made

    # ---- the kernel that brings them together: rows of parts, one for each element of a result

    def together(self, parts: Mapping[Node, Tensor]) -> Lowered:
        found, graph = self.found, self.graph
        index = min(n.operator.index for n in graph.nodes) - len(parts)
        table: dict[Node, Node] = {}
        read: list[Tensor] = []
        held: dict[Node, Node] = {}
        for place, (node, tensor) in enumerate(parts.items()):
            own = Node(OPS["input"], (), tensor.shape, f32, Operator(index + place, tensor.name, node.where))
            read.append(Tensor(tensor.name, tensor.type, own))
            whole = View.identity(tensor.shape)
            held[node] = seen(own, whole.transposed((*range(1, len(tensor.shape)), 0)))
        table[found.top] = replace(found.top, inputs=(held[found.top],), shape=(*found.top.shape, 1))
        pivot = [n for n in found.between(found.pivot, (found.top,)) if n is not found.top]
        self.expand(pivot, table)
        by = found.exps.operator
        below = Node(OPS["sub"], (held[found.top], table[found.pivot]), held[found.top].shape, f32, by)
        factor = replace(found.exps, inputs=(below,), shape=below.shape)
        for node in held:
            if node is not found.top:
                scaled = Node(OPS["mul"], (held[node], factor), held[node].shape, f32, node.operator)
                table[node] = Node(OPS["sum"], (scaled,), (*node.shape, 1), f32, node.operator)
        self.expand([n for n in found.epilogue if n not in table], table)
        outputs = tuple(
            replace(t, node=seen(table[t.node], View.identity(table[t.node].shape).sliced((..., 0))))
            for t in graph.outputs
        )
        nodes = set(Graph(graph.name, graph.doc, graph.where, (), outputs, {}, graph.sizes).nodes)
        made = Graph(
            name=self.stem if len({t.shape for t in outputs}) > 1 else f"{self.stem}_{outputs[0].name}",
            doc=f"{', '.join(t.name for t in outputs)} of {graph.name}.",
            where=graph.where,
            inputs=tuple(t for t in (*read, *graph.inputs) if t.node in nodes),
            outputs=outputs,
            names={table[n]: name for n, name in graph.names.items() if table.get(n) in nodes},
            sizes=graph.sizes,
        )
        return through(self.step, lowered(made), self.found.product)

    def expand(self, nodes: list[Node], table: dict[Node, Node]) -> None:
        """Nodes with one more axis behind all others."""
        for node in nodes:
            if not node.shape:
                table[node] = node
            elif node.op.kind is Kind.INPUT:
                table[node] = seen(node, View.identity(node.shape).sliced((..., None)))
            else:
                table[node] = replace(node, inputs=tuple(table[a] for a in node.inputs), shape=(*node.shape, 1))


def through(step: Lowered, second: Lowered, product: Node) -> Lowered:
    """A kernel of the step's tensors as one of the chain's, of which those are views. Raises NotOneStep."""
    outer = {b.tensor: b for b in step.bounds}
    sizes = {name: replaced(size, step.sizes) for name, size in second.sizes.items()}
    bounds = []
    for b in (replace(b, view=b.view.renamed(step.sizes)) for b in second.bounds):
        own = outer.get(b.base)
        try:
            bounds.append(b if own is None else Bound(b.tensor, own.base, b.view.of(own.view)))
        except ValueError as error:
            raise NotOneStep(product, str(error)) from None
    return replace(second, bounds=tuple(bounds), sizes=sizes)


def seen(node: Node, view: View) -> Node:
    return Node(OPS["view"], (node,), view.shape, node.dtype, node.operator, view=view)
