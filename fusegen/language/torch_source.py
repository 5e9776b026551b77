"""Graph -> torch source: the chain as its author would write it in torch, to be run eagerly or by torch.compile.

Composites become the functions that torch has for them (softmax, layer_norm, ...), a product with a bias F.linear or
torch.addmm, everything else one torch op an op.
Arrays keep their storage types and torch promotes them, as in a user's model, so values are rounded after every op.
What depends on no operand, such as a causal mask, is made beforehand by `constants`; torch.compile makes it in the
kernel, from `constants` inside of what it compiles.

It is a peer to be timed against and no reference: where torch decides an edge case otherwise (a softmax row of -inf
gives NaN, topk returns masked columns too and ties in any order), torch's way stands.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from fusegen.errors import Where
from fusegen.language import ops
from fusegen.language.graph import Extent, Graph, Kind, Node, Operator, plain, shown_by
from fusegen.language.naming import value_names
from fusegen.language.nodes import size_number
from fusegen.language.scans import SORTED, WAYS
from fusegen.language.torch_views import size_line, view_text
from fusegen.language.trace import OPS, Value, tracing
from fusegen.language.types import F8, Dim, DType, f32, i4, i8, i32, size_of, u4, u8, u32

DTYPES: Mapping[str, str] = {
    "f16": "torch.float16", "bf16": "torch.bfloat16", "f32": "torch.float32", "i32": "torch.int32", "b8": "torch.bool",
    "f8e4m3": "torch.float8_e4m3fn", "f8e5m2": "torch.float8_e5m2", "f8e4m3fnuz": "torch.float8_e4m3fnuz",
    "f8e5m2fnuz": "torch.float8_e5m2fnuz", "f8e8m0": "torch.float8_e8m0fnu", "i64": "torch.int64",
    "i8": "torch.int8", "u8": "torch.uint8", "u32": "torch.uint32",
}  # fmt: skip
TAKEN = frozenset(("torch", "F", "device", "constants"))
IN_BEST_GROUPS = (
    "torch.where(torch.zeros_like(s := {0}.unflatten(-1, ({groups}, -1)).topk({by}, -1).values.sum(-1)).scatter(-1, "
    "s.topk({best}, -1).indices, 1.0).bool().repeat_interleave({0}.shape[-1] // {groups}, -1), {0}, -torch.inf)"
)
GROUP_VECTORS = (  # of each row its group's
    "F.pad({1}, (0, 0, 0, 1))[torch.searchsorted({2}.cummax(0).values, "
    "torch.arange({0}.shape[0], dtype={2}.dtype, device={2}.device), right=True)]"
)
TEXTS: Mapping[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
    "abs": "torch.abs({0})", "square": "torch.square({0})", "pow": "{0} ** {1}",
    "maximum": "torch.maximum({0}, {1})", "minimum": "torch.minimum({0}, {1})",
    "exp": "torch.exp({0})", "log": "torch.log({0})", "sqrt": "torch.sqrt({0})", "rsqrt": "torch.rsqrt({0})",
    "log1p": "torch.log1p({0})", "log_of_normal": "torch.log({0})", "tanh_log1p": "torch.tanh(torch.log1p({0}))",
    "exp2": "torch.exp2({0})", "expm1": "torch.expm1({0})", "log2": "torch.log2({0})",
    "sin": "torch.sin({0})", "cos": "torch.cos({0})", "floor": "torch.floor({0})", "ceil": "torch.ceil({0})",
    "trunc": "torch.trunc({0})", "round": "torch.round({0})", "sign": "torch.sign({0})",
    "fmod": "torch.fmod({0}, {1})", "floor_div": "torch.floor_divide({0}, {1})", "mod": "torch.remainder({0}, {1})",
    "isnan": "torch.isnan({0})", "isinf": "torch.isinf({0})", "isfinite": "torch.isfinite({0})",
    "small_pow": "{0} ** {1}", "tanh": "torch.tanh({0})", "erf": "torch.erf({0})",
    "sigmoid": "torch.sigmoid({0})", "relu": "torch.relu({0})",
    "silu": "F.silu({0})", "gelu_erf": "F.gelu({0})", "gelu_tanh": 'F.gelu({0}, approximate="tanh")',
    "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "eq": "{0} == {1}",
    "ne": "{0} != {1}", "logical_and": "{0} & {1}", "logical_or": "{0} | {1}", "logical_not": "~{0}",
    "bit_and": "{0} & {1}", "bit_or": "{0} | {1}", "bit_xor": "{0} ^ {1}", "bit_not": "~{0}",
    "power_of_2_above": "torch.exp2(torch.ceil(torch.log2({0}.clamp(2.0**-126, 2.0**127).nan_to_num(2.0**127))))",
    "power_of_2_below": "torch.exp2(torch.floor(torch.log2({0}.clamp(2.0**-126, 2.0**127).nan_to_num(2.0**127))))",
    "to_unit": "({0} >> 8 & 0xFFFFFF) * 2.0**-24", "shift_left": "{0} << {1}", "shift_right": "{0} >> {1}",
    "where": "torch.where({0}, {1}, {2})",
    "to_f32": "{0}.to(torch.float32)", "to_i32": "{0}.to(torch.int32)", "to_b8": "{0} != 0",
    "to_u32": "{0}.to(torch.int64)",
    "round_f16": "{0}.to(torch.float16).to({0}.dtype)", "round_bf16": "{0}.to(torch.bfloat16).to({0}.dtype)",
    **{f"round_{d}": f"{{0}}.clamp({d.nearest[0]}, {d.nearest[1]}).to({DTYPES[d.name]}).to({{0}}.dtype)" for d in F8},
    **{f"overflow_{d}": f"{{0}}.to({DTYPES[d.name]}).to({{0}}.dtype)" for d in F8},
    **{f"code_of_{d}": f"{{0}}.to({DTYPES[d.name]}).view(torch.uint8).to(torch.int32)" for d in F8},
    **{f"{d}_of_code": f"{{0}}.to(torch.uint8).view({DTYPES[d.name]}).to(torch.float32)" for d in F8},
    "bits_of_f32": "{0}.view(torch.int32)", "f32_of_bits": "{0}.view(torch.float32)",
    **{f"to_{d}": f"{{0}}.round().clamp({d.least:.0f}, {d.largest:.0f}).to(torch.int32)" for d in (i8, u8, i4, u4)},
    "sum": "torch.sum({0}, -1, keepdim=True)", "max": "torch.amax({0}, -1, keepdim=True)",
    "prod": "torch.prod({0}, -1, keepdim=True)", "min": "torch.amin({0}, -1, keepdim=True)",
    **{way.name: way.torch_text for way in WAYS}, **{way.name: way.torch_text for way in SORTED},
    "largest_by_sum": "torch.zeros_like({0}).scatter(-1, (s := torch.sort({0}, -1, True)).indices, "
    "torch.where(s.values.cumsum(-1) - s.values < {1}, s.values, 0.0))",
    "largest_by_count": "torch.where({0}.argsort(-1, True).argsort(-1) < {1}, {0}, -torch.inf)",
    "top_columns": "torch.topk({0}, {k}, -1{order}).indices", "take": "torch.take_along_dim({0}, {1}, -1)",
    "gather": "{0}[{1}]", "take_at": "torch.take_along_dim({0}, {1}.long(), -1)",
    "scatter": "{0}.index_copy_(0, {1}.flatten().long(), {2}.flatten(0, -{0}.dim()).to({0}.dtype))",
    "code_of_f4e2m1": "(8 * ({0} < 0) + torch.where((a := {0}.abs().nan_to_num(6.0)) < 2, (2 * a).round(), "
    "torch.where(a < 4, 2 + a.round(), 4 + (a / 2).round().clamp(max=3)))).to(torch.int32)",
    "f4e2m1_of_code": "torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], "
    "device={0}.device)[{0}.long() & 15]",
    "round_f4e2m1": "torch.where((a := {0}.abs().nan_to_num(6.0)) < 2, (2 * a).round() / 2, "
    "torch.where(a < 4, a.round(), 2 * (a / 2).round()).clamp(max=6)).copysign({0})",
    "group_ends": "torch.searchsorted(torch.sort({0}.masked_fill({0} < 0, 2**31 - 1)).values, "
                  "torch.arange({groups}, dtype={0}.dtype, device={0}.device), right=True).to(torch.int32)",
    "slot_order": "torch.argsort({0}.masked_fill(({0} < 0) | ({0} >= {1}.shape[0]), 2**31 - 1), stable=True)"
                  ".to(torch.int32)",
    "slot_places": "torch.argsort(torch.argsort({0}.masked_fill(({0} < 0) | ({0} >= {1}.shape[0]), 2**31 - 1), "
                   "stable=True)).to(torch.int32)",
    "transpose": "{0}.mT", "matmul": "{0} @ {1}", "matmul_tf32": "{0} @ {1}",
    "grouped_matmul": "F.grouped_mm({0}, {1}, offs={2})", "matmul_over_groups": "F.grouped_mm({0}, {1}, offs={2})",
    "add_group_rows": "{0} + " + GROUP_VECTORS, "scale_group_rows": "{0} * " + GROUP_VECTORS,
}  # fmt: skip
SCATTERED_BYTES = (  # torch has no index_copy_ of 8-bit floats
    "{0}.view(torch.uint8).index_copy_(0, {1}.flatten().long(), "
    "{2}.flatten(0, -{0}.dim()).to({0}.dtype).view(torch.uint8)).view({0}.dtype)"
)
GROUPS = (  # every group's product of all rows, of which each keeps its own group's
    "torch.stack([*({0} @ {1}), torch.zeros_like({0} @ {1}[0])])[torch.searchsorted({2}.cummax(0).values, "
    "torch.arange({0}.shape[0], dtype={2}.dtype, device={2}.device), right=True), "
    "torch.arange({0}.shape[0], device={2}.device)]"
)
BLOCKS = (  # of 128 x 128, scaled before they are multiplied
    "({0}.float() * {2}.repeat_interleave(128, -1)) @ "
    "({1}.float() * {3}.mT.repeat_interleave(128, -2).repeat_interleave(128, -1))"
)
CLAMPS = {"maximum": "torch.clamp({0}, min={1})", "minimum": "torch.clamp({0}, max={1})"}  # by a number


# ---------------------------------------------------------------- composites that torch has


@dataclass(frozen=True, slots=True)
class Composite:
    """A composite of `fusegen.ops` and torch's function for it. `arrays` are its operands, the first one the row; the
    others lie along it. `numbers` are literals of the call."""

    name: str
    call: Callable[..., Value]
    text: str
    arrays: tuple[str, ...] = ("x",)
    numbers: tuple[str, ...] = ()
    takes_dtype: bool = False


NORM = "F.{name}({{x}}, ({{x}}.shape[-1],){weights}, eps={{eps}})"
COMPOSITES = (
    Composite("softmax", ops.softmax, "torch.softmax({x}, -1{dtype})", takes_dtype=True),
    Composite("log_softmax", ops.log_softmax, "torch.log_softmax({x}, -1{dtype})", takes_dtype=True),
    *(
        Composite("layernorm", ops.layernorm, NORM.format(name="layer_norm", weights=weights), arrays, ("eps",))
        for arrays, weights in (
            (("x", "gamma", "beta"), ", {gamma}, {beta}"), (("x", "gamma"), ", {gamma}"),
            (("x", "beta"), ", bias={beta}"), (("x",), ""),
        )
    ),
    Composite("rmsnorm", ops.rmsnorm, NORM.format(name="rms_norm", weights=", {gain}"), ("x", "gain"), ("eps",)),
    Composite("rmsnorm", ops.rmsnorm, NORM.format(name="rms_norm", weights=""), ("x",), ("eps",)),
    Composite("mean", ops.mean, "torch.mean({x}, -1, keepdim=True)"),
    Composite("var", ops.var, "torch.var({x}, -1, correction=0, keepdim=True)"),
    Composite("std", ops.std, "torch.std({x}, -1, correction=0, keepdim=True)"),
    Composite("norm", ops.norm, "torch.linalg.vector_norm({x}, dim=-1, keepdim=True)"),
    Composite("logsumexp", ops.logsumexp, "torch.logsumexp({x}, -1, keepdim=True)"),
    Composite("l2norm", ops.l2norm, "F.normalize({x}, dim=-1, eps={eps})", numbers=("eps",)),
    Composite("softplus", ops.softplus, "F.softplus({x})"),
    Composite("softsign", ops.softsign, "F.softsign({x})"),
    Composite("mish", ops.mish, "F.mish({x})"),
    Composite("elu", ops.elu, "F.elu({x}, {alpha})", numbers=("alpha",)),
    Composite("selu", ops.selu, "F.selu({x})"),
    Composite("leaky_relu", ops.leaky_relu, "F.leaky_relu({x}, {slope})", numbers=("slope",)),
    Composite("hardsigmoid", ops.hardsigmoid, "F.hardsigmoid({x})"),
    Composite("hardswish", ops.hardswish, "F.hardswish({x})"),
    Composite("dropout", lambda x, p: ops.dropout(x, p, 0, 0), "F.dropout({x}, {p})", numbers=("p",)),
    Composite("clip", ops.clip, "torch.clamp({x}, {low}, {high})", numbers=("low", "high")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pattern:
    """A composite traced on stand-ins: `root` is its result, `arrays` and `numbers` its parameters in it."""

    composite: Composite
    root: Node
    arrays: Mapping[Node, str]
    numbers: Mapping[float, str]


@functools.cache
def patterns() -> tuple[Pattern, ...]:
    return tuple(map(pattern, COMPOSITES))


def pattern(composite: Composite) -> Pattern:
    rows, cols = Dim("rows"), Dim("cols")
    place = Operator(-1, composite.name, Where("", 0))
    nodes = {
        name: Node(OPS["input"], (), (rows, cols) if name == "x" else (cols,), f32, place) for name in composite.arrays
    }
    marks = {name: 2.0**-3 + 2.0**-20 + number for number, name in enumerate(composite.numbers)}  # no formula has them
    with tracing(composite.call):
        root = composite.call(**{name: Value(node) for name, node in nodes.items()}, **marks).node
    return Pattern(composite, root, {n: name for name, n in nodes.items()}, {m: name for name, m in marks.items()})


def match(node: Node) -> tuple[Composite, dict[str, Node]] | None:
    """The composite whose result `node` is, and what stands for its parameters."""
    for known in patterns():
        found: dict[str, Node] = {}
        if known.composite.name == node.operator.name and unify(known, known.root, node, found):
            row = found["x"].shape[-1:]
            if all(found[name].shape == row for name in known.composite.arrays[1:]):
                return known.composite, found
    return None


def unify(known: Pattern, wanted: Node, node: Node, found: dict[str, Node]) -> bool:
    """Does the graph at `node` have the pattern's form at `wanted`? Fills in `found`."""
    name = known.arrays.get(wanted)
    if name is None and isinstance(wanted.literal, float):
        name = known.numbers.get(wanted.literal)
        if name is not None and node.literal is None:
            return False
    if name is not None:
        return found.setdefault(name, node) is node or (
            node.literal is not None and found[name].literal == node.literal
        )
    if wanted.op.name == node.op.name == "philox":  # torch has a generator, and draws other bits
        return True
    if wanted.op is not node.op or node.over or len(wanted.inputs) != len(node.inputs):
        return False
    if repr(wanted.literal) != repr(node.literal):
        return False
    return all(unify(known, w, n, found) for w, n in zip(wanted.inputs, node.inputs, strict=True))


def over_axes(name: str, template: str, axes: tuple[int, ...]) -> str:
    """A reduction's text over axes of rows. torch.prod takes one axis at a time."""
    if name != "prod":
        return template.replace("-1", str(axes))
    found = "{0}"
    for axis in axes:
        found = template.replace("-1", str(axis)).replace("{0}", found)
    return found


@dataclass(frozen=True, slots=True)
class Biased:
    """A product and the bias that is added to it, as torch does both at once."""

    text: str
    arrays: tuple[Node, ...]
    dtype: DType


def biased(node: Node, graph: Graph) -> Biased | None:
    """F.linear where the weights are declared [N, K], torch.addmm of matrices that are [K, N]."""
    if node.op.name != "add":
        return None
    for product, bias in (node.inputs, node.inputs[::-1]):
        if product.op.kind is not Kind.PRODUCT or graph.users[product] != (node,) or len(bias.shape) != 1:
            continue
        if product.any_ends:
            continue
        if any(t.node is product for t in graph.outputs) or bias.shape != product.shape[-1:]:
            continue
        dtype = graph.factor_types[product]
        if bias not in graph.tensor_of or graph.tensor_of[bias].dtype is not dtype:
            continue
        x, w = product.factors
        if w.op.kind is Kind.TRANSPOSE and len(w.shape) == 2:
            return Biased("F.linear({0}, {1}, {2})", (x, w.inputs[0], bias), dtype)
        if len(x.shape) == len(w.shape) == 2:
            return Biased("torch.addmm({2}, {0}, {1})", (x, w, bias), dtype)
    return None


# ---------------------------------------------------------------- the text


def function_name(graph: Graph) -> str:
    return f"{graph.name}_" if graph.name in TAKEN else graph.name


def torch_source(graph: Graph) -> str:
    """A module with the chain as a function of its operands and of what `constants(device)` returns; it has the chain's
    name, or the nearest one that the module has no other use for."""
    graph = graph.written
    writer = Writer(graph)
    body = list(writer.body())
    made = list(writer.made_beforehand())
    hoisted = ", ".join(writer.name(n) for n in writer.hoisted)
    parameters = ", ".join([*(writer.name(t.node) for t in graph.inputs), *([hoisted] if hoisted else [])])
    returned = ", ".join(writer.returned())
    lines = [
        f'"""{graph.name} as its author would write it in torch, at {graph.sizes_text()}."""\n',
        "import torch",
        "import torch.nn.functional as F\n",
        *([sizes] if (sizes := size_line(graph)) else []),
        "\ndef constants(device):",
        *(f"    {line}" for line in made),
        f"    return ({hoisted},)\n\n" if hoisted else "    return ()\n\n",
        f"def {function_name(graph)}({parameters}):",
        *(f"    {line}" for line in body),
        f"    return {returned}",
    ]
    return "\n".join(lines) + "\n"


class Writer:
    """Spells one graph. `hoisted`: the values that depend on no operand, as far as others need them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names = {n: f"{name}_" if name in TAKEN else name for n, name in value_names(graph).items()}
        self.outputs: dict[Node, DType] = {t.node: t.dtype for t in graph.outputs}
        self.constant = self.without_operands()
        self.composites = {n: found for n in graph.nodes if (found := match(n)) is not None}
        self.biased = {n: pair for n in graph.nodes if (pair := biased(n, graph)) is not None}
        self.wanted = self.needed()
        self.values = self.taken_with_columns()
        self.hoisted = [
            n for n in graph.nodes
            if n in self.constant and n in self.wanted and n in self.names
            and any(u in self.wanted and u not in self.constant for u in graph.users[n])
        ]  # fmt: skip

    def without_operands(self) -> set[Node]:
        found: set[Node] = set()
        for node in self.graph.nodes:
            if node.op.kind is not Kind.INPUT and node.op.name != "philox" and all(a in found for a in node.inputs):
                found.add(node)
        return found

    def arguments(self, node: Node) -> tuple[Node, ...]:
        """What the line of `node` names."""
        if node in self.biased:
            return self.biased[node].arrays
        if node.op.name == "philox":
            return ()
        composite = self.composites.get(node)
        return node.inputs if composite is None else tuple(dict.fromkeys(composite[1].values()))

    def needed(self) -> set[Node]:
        wanted = {t.node for t in self.graph.outputs}
        for node in reversed(self.graph.nodes):
            if node in wanted:
                wanted.update(self.arguments(node))
        return wanted

    def taken_with_columns(self) -> dict[Node, Node]:
        """The selection and the take of what it chose from: torch.topk gives both."""
        takes = (n for n in self.graph.nodes if n.op.name == "take" and n in self.wanted)
        return {n.inputs[1]: n for n in takes if n.inputs[1].inputs[0] is n.inputs[0]}

    def missing_axes(self, node: Node) -> int:
        x, columns = node.inputs
        return max(0, len(columns.shape) - len(x.shape))

    def name(self, node: Node) -> str:
        return self.names[node]

    def body(self) -> Iterator[str]:
        for tensor in self.graph.inputs:
            if tensor.dtype is u32 and tensor.shape:  # on which torch itself has few ops
                yield f"{self.name(tensor.node)} = {self.name(tensor.node)}.to(torch.int64)"
            if tensor.dtype in (i8, u8) and tensor.shape and self.computed_with(tensor.node):  # as i32, not modulo 256
                yield f"{self.name(tensor.node)} = {self.name(tensor.node)}.to(torch.int32)"
        for node in self.graph.nodes:
            if node not in self.wanted or node in self.constant or node.op.kind is Kind.INPUT:
                continue
            if node in self.values:
                yield f"{self.name(self.values[node])}, {self.name(node)} = {self.text(node)}"
            elif node not in self.values.values():
                yield f"{self.name(node)} = {self.text(node)}"

    def computed_with(self, node: Node) -> bool:
        """Does an op read the numbers, as they are or through views?"""
        users = self.graph.users[node]
        return any(
            (u.op.kind is Kind.MAP and u.op.name != "to_f32")
            or (u.op.kind in (Kind.VIEW, Kind.JOIN) and self.computed_with(u))
            for u in users
        )

    def made_beforehand(self) -> Iterator[str]:
        needed = set(self.hoisted)
        for node in reversed(self.graph.nodes):
            if node in needed:
                needed.update(node.inputs)
        for node in self.graph.nodes:
            if node in needed and node in self.names:
                yield f"{self.name(node)} = {self.text(node)}"

    def text(self, node: Node) -> str:
        """Values of u32 are int64 there, modulo 2^32."""
        if node.dtype is u32 and node.op.kind is Kind.MAP and node.op.name != "where":
            if node.op.name == "to_u32" and node.inputs[0].dtype is f32:
                return f"{self.name(node.inputs[0])}.nan_to_num(0.0).clamp(0, 2.0**32 - 1).to(torch.int64)"
            return f"({self.plain_text(node)}) & 0xFFFFFFFF"
        return self.plain_text(node)

    def narrow_groups(self, node: Node, ends: str) -> str:
        """A grouped product of 8 bits. torch's grouped_mm takes bf16 alone, and rounds its sums to it. So all rows are
        multiplied by each group's matrix, in f32, or of whole numbers in f64, and each row keeps its own group's."""
        x, w, *scales = (self.name(a) for a in node.inputs if a is not node.any_ends)
        wide = "torch.float64" if node.dtype is i32 else "torch.float32"
        left, right = f"{x}.to({wide})", f"{w}.to({wide})"
        if scales:
            left = f"({left} * {scales[0]}.repeat_interleave(128, -1))"
            right = f"({right} * {scales[1]}.mT.repeat_interleave(128, -2).repeat_interleave(128, -1))"
        text = GROUPS.format(left, right, ends)
        return f"({text}).to(torch.int32)" if node.dtype is i32 else text

    def plain_text(self, node: Node) -> str:
        if node in self.composites:
            return self.composite_text(node)
        if node in self.biased:
            found = self.biased[node]
            return found.text.format(*(self.factor(a, found.dtype) for a in found.arrays))
        if node.op.kind is Kind.PRODUCT:
            dtype = self.graph.factor_types[node]
            if node.any_ends:
                computed = bool(node.any_ends.inputs)  # torch's sums are of i64
                ends = self.name(node.any_ends) + ".to(torch.int32)" * computed
                if node.scales or dtype.narrow:
                    return self.narrow_groups(node, ends)
                return TEXTS[node.op.name].format(*(self.factor(a, dtype) for a in node.factors), ends)
            if node.scales:
                return BLOCKS.format(*map(self.name, node.inputs))
            if dtype.narrow:  # torch's own products of 8 bits want scales, and sizes that are multiples of 16
                wide = "torch.float64" if node.dtype is i32 else "torch.float32"
                text = TEXTS["matmul"].format(*(f"{self.name(a)}.to({wide})" for a in node.inputs))
                return f"({text}).to(torch.int32)" if node.dtype is i32 else text
            return TEXTS[node.op.name].format(*(self.factor(a, dtype) for a in node.inputs))
        if node.op.name == "philox":  # torch's own generator, which is another one
            shape = tuple(size_of(size, self.graph.sizes) for size in node.shape)
            beside = next(self.name(t.node) for t in self.graph.inputs if t.shape)
            return f"torch.randint(-(2**31), 2**31, {shape}, dtype=torch.int32, device={beside}.device)"
        if node.op.kind in (Kind.VIEW, Kind.JOIN):
            return view_text(node, [self.name(a) for a in node.inputs], self.graph)
        if node.op.kind is Kind.LEAF:
            axis = -1 if node.op.name == "col_index" else -2
            size = (node.shape if self.graph.viewed else self.graph.shape)[axis]
            index = f"torch.arange({size_of(size, self.graph.sizes)}, device=device)"
            return index if axis == -1 else f"{index}[:, None]"
        arguments = [self.argument(a, node) for a in node.inputs]
        template = TEXTS[node.op.name]
        if node.over:
            template = over_axes(node.op.name, template, node.over)
        if node.op.name == "top_columns":
            if node.shape[-1] == 1 and node not in self.values:
                return f"torch.argmax({arguments[0]}, -1, keepdim=True)"
            k = size_of(node.shape[-1], self.graph.sizes)
            if node.limit:
                arguments[0] = IN_BEST_GROUPS.format(arguments[0], **asdict(node.limit))
            text = template.format(*arguments, k=k, order="" if node.ordered else ", sorted=False")
            return text.removesuffix(".indices") if node in self.values else text
        if node.op.name == "take":  # torch wants as many axes of both
            arguments[0] += f"[{', '.join(['None'] * missing)}]" if (missing := self.missing_axes(node)) else ""
        if node.op.name == "gather":  # its index has an axis for each of a row's
            own = len(node.inputs[0].shape) - 1
            arguments[1] += f"[..., {', '.join(['0'] * own)}]" if own and node.inputs[1].shape else ""
        if node.op.name == "scatter" and self.graph.tensor_of[node.inputs[0]].dtype.narrow:
            template = SCATTERED_BYTES
        if node.op.name in CLAMPS and any(self.is_number(a) for a in node.inputs):
            template = CLAMPS[node.op.name]
            if self.is_number(node.inputs[0]):
                arguments.reverse()
        if node.op.name == "group_ends":
            return template.format(*arguments, groups=size_of(node.shape[-1], self.graph.sizes))
        return template.format(*arguments)

    def is_number(self, node: Node) -> bool:
        return node not in self.names or (node.op.kind is Kind.INPUT and not node.shape)

    def argument(self, node: Node, user: Node) -> str:
        """A name or a number; an operation between numbers alone works on tensors, since torch's functions do."""
        text = self.name(node) if node in self.names else number_text(node, self.graph)
        held = self.graph.tensor_of.get(shown_by(node))
        if held is not None and held.dtype.narrow and held.dtype.kind == "float" and user.op.kind is Kind.MAP:
            text = f"{text}.to(torch.float32)"  # torch computes nothing with 8 bits
        alone = user.op.kind is Kind.MAP and all(self.is_number(a) for a in user.inputs)
        return f"torch.as_tensor({text})" if alone and self.graph.extents[user] is Extent.LAUNCH else text

    def factor(self, node: Node, dtype: DType) -> str:
        """A factor in the products' type, as torch wants both; one that is made from several types may have another."""
        sources = {self.graph.tensor_of[n].dtype for n in self.graph.ancestors(node) if n in self.graph.tensor_of}
        name = self.name(node)
        return name if plain(node) or sources == {dtype} else f"{name}.to({DTYPES[dtype.name]})"

    def composite_text(self, node: Node) -> str:
        composite, found = self.composites[node]
        words = {name: self.name(n) if n in self.names else number_text(n, self.graph) for name, n in found.items()}
        if self.is_number(found["x"]):  # torch's functions take tensors
            words["x"] = f"torch.as_tensor({words['x']})"
        kept = self.graph.storage[found["x"]]
        for name in composite.arrays[1:]:  # torch wants a norm's weights in the type of its row
            if self.graph.storage[found[name]] is not kept:
                words[name] += f".to({DTYPES[kept.name]})"
        wider = self.outputs.get(node, kept)
        dtype = f", dtype={DTYPES[wider.name]}" if wider is not kept else ""
        return composite.text.format(**words, **({"dtype": dtype} if composite.takes_dtype else {}))

    def returned(self) -> Iterator[str]:
        """The outputs in the types declared; an operand that comes back is a copy. `.to` does nothing where it fits."""
        for tensor in self.graph.outputs:
            if tensor.node.op.kind is Kind.INPUT:
                yield f"{self.name(tensor.node)}.to({DTYPES[tensor.dtype.name]}, copy=True)"
            else:
                yield f"{self.name(tensor.node)}.to({DTYPES[tensor.dtype.name]})"


def number_text(node: Node, graph: Graph) -> str:
    """A literal or a size as Python text, in brackets where it could bind wrongly."""
    if node.size is not None:
        return repr(size_number(node, graph.sizes))
    value = node.literal
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return f"({value!r})" if isinstance(value, (int, float)) and value < 0 else repr(value)


# ---------------------------------------------------------------- running it


@dataclass(frozen=True, slots=True)
class TorchChain:
    """The generated functions. Eagerly: `function(*operands, *constants(device))`."""

    source: str
    function: Callable[..., Any]
    constants: Callable[[Any], tuple[Any, ...]]


def torch_chain(graph: Graph) -> TorchChain:
    """The chain as torch functions. Raises ImportError without torch."""
    source = torch_source(graph)
    module = ModuleType(f"fusegen_torch_{graph.name}")
    sys.modules[module.__name__] = module  # torch.compile imports the module of what it compiles
    exec(compile(source, f"<torch source of {graph.name}>", "exec"), vars(module))
    return TorchChain(source, getattr(module, function_name(graph)), module.constants)
