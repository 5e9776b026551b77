"""derive(chain): the chain of a chain's gradients, as `backward=` of fusegen.torch.op and fusegen.jax.op takes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fusegen.derivatives.placing import of_rank
from fusegen.derivatives.reading import with_outputs_read
from fusegen.derivatives.reverse import Reverse, moving
from fusegen.derivatives.tidying import tidied
from fusegen.errors import RequestError, SpecError
from fusegen.language import ops as F
from fusegen.language.graph import Graph, Kind, Node, Operator, Tensor
from fusegen.language.sizes import dims_in
from fusegen.language.spec import Chain, check_graph
from fusegen.language.trace import OPS, Value, tracing

DERIVED = "derived"
"""What `backward=` says for the chain that `derive` makes."""


def derive(chain: Chain, of: Sequence[str] | None = None, outputs: Sequence[str] | None = None) -> Chain:
    """The gradients of a chain, as a chain of its own, by reverse mode over the chain's ops.

    Its operands are those of the forward operands that it needs, by their names, then `d<output>` for each output of
    floats, of the output's type; `outputs` names those whose gradients come, and the others count as 0. Its outputs are
    `d<operand>`, of the operand's type, for the operands named in `of`, else for all arrays of f16, bf16 and f32 that
    an output varies with.

    Values between are computed again. One that the forward chain returns is an operand instead where that reads less
    memory, or spares a reduction or a product: then the chain computes with it as it was stored.

    Raises SpecError, with the line of the spec, at an op that has no gradient; RequestError for names that are no
    operand and no output.
    """
    if not isinstance(chain, Chain):
        raise RequestError(f"fusegen.derive takes a chain, found {chain!r}")
    graph = chain.graph
    if graph.updates:
        operand = next(iter(graph.updates.values()))
        raise SpecError(f"{graph.name} writes to {operand} in its own memory, and has no gradients", graph.where)
    wanted = operands_asked_for(graph, of)
    seeds = seeded(graph, outputs, frozenset(t.node for t in wanted))
    need_free_names(graph, [*wanted, *seeds])
    found = reversed_graph(graph, wanted, seeds)
    both = tidied(replace(found, outputs=(*found.outputs, *graph.outputs)), last_operator(graph))
    found = with_outputs_read(both, len(found.outputs))
    order = [t.name for t in (*graph.inputs, *graph.outputs, *seeds.values())]
    used = [t for t in found.inputs if t.node in set(found.nodes)]
    found = replace(found, inputs=tuple(sorted(used, key=lambda t: order.index(t.name))))
    found.need_sizes()
    check_graph(found)
    return Chain(found)


def operands_asked_for(graph: Graph, of: Sequence[str] | None) -> list[Tensor]:
    """Raises RequestError for what is no array of floats."""
    floats = [t for t in graph.inputs if t.shape and t.dtype.kind == "float"]
    if of is None:
        return [t for t in floats if not t.dtype.narrow]
    names = {t.name: t for t in floats}
    of = (of,) if isinstance(of, str) else tuple(of)
    if wrong := [name for name in of if name not in names]:
        raise RequestError(
            f"{graph.name} has no array of floats {wrong[0]!r} to take the gradient of; it has {', '.join(names)}"
        )
    return [names[name] for name in dict.fromkeys(of)]


def seeded(graph: Graph, outputs: Sequence[str] | None, wanted: frozenset[Node]) -> dict[Tensor, Tensor]:
    """The gradient of each output that varies with what is wanted, as an operand."""
    names = [t.name for t in graph.outputs]
    if outputs is not None:
        outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        if wrong := [name for name in outputs if name not in names]:
            raise RequestError(f"{graph.name} has no output {wrong[0]!r}; it has {', '.join(names)}")
    varies = moving(graph, wanted)
    found: dict[Tensor, Tensor] = {}
    for place, tensor in enumerate(graph.outputs):
        if tensor.node not in varies or (outputs is not None and tensor.name not in outputs):
            continue
        name = f"d{tensor.name}"
        operator = Operator(place - len(graph.outputs), name, tensor.node.where)
        node = Node(OPS["input"], (), tensor.shape, tensor.dtype.value, operator)
        found[tensor] = Tensor(name, tensor.type, node)
    if not found:
        raise RequestError(
            f"{graph.name} has no gradients: no output of floats varies with an operand whose gradient is wanted"
        )
    return found


def need_free_names(graph: Graph, tensors: Iterable[Tensor]) -> None:
    """Raises RequestError where the name of a gradient is an operand's or an output's already."""
    taken = {t.name for t in (*graph.inputs, *graph.outputs)}
    for tensor in tensors:
        if (name := f"d{tensor.name}") in taken:
            raise RequestError(
                f"{graph.name}: {name} is the gradient of {tensor.name}, and something else has that name\n"
                f"  give {name} another name in the spec, or leave {tensor.name} out by of=(...)"
            )


def last_operator(graph: Graph) -> int:
    return 1 + max(node.operator.index for node in graph.nodes)


def reversed_graph(graph: Graph, wanted: Sequence[Tensor], seeds: dict[Tensor, Tensor]) -> Graph:
    """The graph of the gradients, before anything of it is simplified."""
    with tracing(reversed_graph) as trace:
        trace.at = graph.where
        trace.operators = [Operator(n, "forward", graph.where) for n in range(last_operator(graph))]
        trace.operands = {t.node: t for t in (*graph.inputs, *seeds.values())}
        reverse = Reverse(graph, frozenset(t.node for t in wanted), trace)
        for tensor, seed in seeds.items():
            with trace.operator("gradient"):
                reverse.add(tensor.node, Value(seed.node))
        reverse.run()
        trace.at = graph.where
        made = []
        for tensor in wanted:
            with trace.operator(f"d{tensor.name}"):
                gradient = reverse.gradient(tensor.node)
                if gradient is not None:
                    if gradient.node.op.kind is not Kind.INPUT:
                        trace.names[gradient.node] = f"d{tensor.name}"
                    made.append((tensor, as_declared(gradient, tensor, seeds.values()).node))
    outputs = [Tensor(f"d{tensor.name}", tensor.type, node) for tensor, node in made]
    names = {**trace.names, **{n: name for n, name in graph.names.items() if n not in trace.names}}
    names |= {t.node: t.name for t in seeds.values()}
    shapes = [t.shape for t in (*graph.inputs, *seeds.values(), *outputs)]
    used = {dim.name for shape in shapes for dim in dims_in(shape)}
    return Graph(
        name=f"{graph.name}_backward",
        doc=f"The gradients of {graph.name}, derived from it.",
        where=graph.where,
        inputs=(*graph.inputs, *seeds.values()),
        outputs=tuple(outputs),
        names=names,
        sizes={name: size for name, size in graph.sizes.items() if name in used},
    )


def as_declared(gradient: Value, operand: Tensor, seeds: Iterable[Tensor]) -> Value:
    """The gradient in its operand's shape: without leading axes of 1, and repeated where it is one value for many.
    Where no gradient that comes in says how many, the operand is read for it."""
    gradient = of_rank(gradient, len(operand.shape))
    if gradient.shape == operand.shape:
        return gradient
    known = {dim for tensor in seeds for dim in dims_in(tensor.shape)}
    if known.issuperset(dims_in(operand.shape)):
        return F.broadcast(gradient, operand.shape)
    own = Value(operand.node)
    return F.where(own == own, gradient, gradient)
