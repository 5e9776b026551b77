"""op(chain, name): a chain as an operator of torch, which torch.compile, torch.export and autograd know.

A kernel by itself is opaque to torch.compile, which breaks its graph there. An operator has a schema, and a rule that
says the shapes and types of its results without running it: `torch.compile(fullgraph=True)` goes through, with row
counts that change from call to call. What runs is the same kernel, compiled at the first call for its row length.

Its rules are registered by torch.library (https://docs.pytorch.org/docs/stable/library.html) for the schema below, not
by `torch.library.custom_op`, whose wrapper costs some microseconds a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

from fusegen.errors import MissingError, RequestError
from fusegen.language.graph import Graph, Tensor
from fusegen.language.sizes import Expr
from fusegen.language.spec import Chain
from fusegen.language.types import b8, f32, size_of
from fusegen.operators import Gradients, Kernels, chain_of_gradients, sizes_of
from fusegen.runtime.libraries import torch_dtype
from fusegen.targets import Target
from fusegen.torch.straight import straight

ARGUMENT_OF = {f32: "float", b8: "bool"}  # of run-time scalars; others are SymInt
KEPT: dict[str, Any] = {}  # torch forgets what is registered once its Library is collected


def op(
    chain: Chain,
    name: str,
    *,
    backward: Chain | Literal["derived"] | None = None,
    gradients: Sequence[str] = (),
    target: str | Target | None = None,
    on: str = "auto",
    validate: bool = True,
    tuned: bool = True,
) -> Any:
    """Register `chain` as the operator `name` ("mylib::add_rmsnorm"), `torch.ops.mylib.add_rmsnorm`, and return it.

    It takes the chain's operands in their order or by name, tensors and numbers, and returns its output, or a tuple of
    them. Beside it stands `torch.ops.mylib.add_rmsnorm_out`, which takes a tensor for each output too, named
    `out_<output>`, and writes there. Kernels are compiled at the first call of each row length, validated like those
    of `fusegen.compile`, which the other keywords are handed to; a kernel's plan is made for as many rows as the chain
    declares.

    `backward`: the chain of its gradients. Its operands go by their names: the chain's own operands, its outputs (one
    output alone is `out`), and `d<output>`, the gradient of one. `gradients` names the operands whose gradients its
    outputs are, in their order; outputs that are called `d<operand>` need no such list. "derived" is the chain that
    `fusegen.derive` makes, of all arrays of floats or of those named in `gradients`. It becomes the operator
    `<name>_backward`. Without it, a tensor that requires a gradient is refused while torch computes gradients.

    Raises RequestError for what is no such name or chain, and where backward's names don't fit; SpecError where an op
    has no gradient to derive; MissingError without torch.
    """
    torch = need_torch()
    backward, gradients = chain_of_gradients("fusegen.torch.op", chain, backward, gradients)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*::[A-Za-z_]\w*", name):
        raise RequestError(f"{name!r} is no operator's name; write a namespace and a name, as in 'mylib::add_rmsnorm'")
    if chain.graph.updates:
        operand = next(iter(chain.graph.updates.values()))
        raise RequestError(
            f"{name}: {chain.name} writes to {operand} in its own memory, and an operator gives new tensors\n"
            "  call what fusegen.compile gives; torch.compile breaks its graph there"
        )
    if name in KEPT:
        raise RequestError(f"{name} is an operator already; give this one another name")
    options = {"target": target, "on": on, "validate": validate, "tuned": tuned}
    rule = None if backward is None else TorchGradients(name, chain.graph, backward.graph, gradients)
    space, _, own = name.partition("::")
    library = torch.library.Library(space, "FRAGMENT")
    kernels = [registered(library, space, own, chain, options)]
    if backward is not None:
        kernels.append(registered(library, space, f"{own}_backward", backward, options))
    if rule is not None:  # an operator without one is some microseconds quicker
        torch.library.register_autograd(name, rule.computed, setup_context=rule.saved, lib=library)
    KEPT[name] = library
    packets = getattr(torch.ops, space)
    for word, found in zip((own, f"{own}_backward"), kernels, strict=False):
        straight(getattr(packets, word), found)
        straight(getattr(packets, f"{word}_out"), found, filling=True)
    return getattr(packets, own).default


def need_torch() -> Any:
    try:
        return import_module("torch")
    except ImportError as error:
        raise MissingError(f"fusegen.torch needs torch, which can't be imported: {error}") from None


def registered(library: Any, space: str, own: str, chain: Chain, options: Mapping[str, Any]) -> Kernels:
    """Define `own` and `<own>_out` in a library: schemas, kernels, and the rules for shapes."""
    torch, graph, kernels = need_torch(), chain.graph, Kernels(chain, options)
    results = ", ".join("Tensor" for _ in graph.outputs)
    returned = f"({results})" if len(graph.outputs) > 1 else results
    places = [f"out_{tensor.name}" for tensor in graph.outputs]
    taken = ", ".join(argument(t) for t in graph.inputs)
    written = ", ".join(f"Tensor({chr(ord('a') + n)}!) {place}" for n, place in enumerate(places))
    library.define(f"{own}({taken}) -> {returned}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    library.define(f"{own}_out({taken}, {written}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    count = len(graph.inputs)

    def run_out(*operands: Any) -> None:
        own_operands, out = operands[:count], operands[count:]
        kernels.call(*own_operands, out=out[0] if len(out) == 1 else out)

    def fake(*operands: Any) -> Any:
        found = results_of(graph, operands)
        return found[0] if len(found) == 1 else tuple(found)

    for device in ("CPU", "CUDA"):  # ROCm's torch says CUDA too
        library.impl(own, kernels.call, device)
        library.impl(f"{own}_out", run_out, device)
    torch.library.register_fake(f"{space}::{own}", fake, lib=library)
    torch.library.register_fake(f"{space}::{own}_out", lambda *operands: None, lib=library)
    for name in (f"{space}::{own}", f"{space}::{own}_out"):
        torch.library.register_vmap(name, no_batches(name), lib=library)
    return kernels


def argument(tensor: Tensor) -> str:
    return f"{'Tensor' if tensor.shape else ARGUMENT_OF.get(tensor.dtype, 'SymInt')} {tensor.name}"


def no_batches(name: str) -> Callable[..., Any]:
    def refuse(info: Any, dims: Any, *operands: Any) -> Any:
        raise RequestError(
            f"{name} has no rule for torch.vmap\n  pass the whole batch: leading axes are rows, of which it takes any "
            "number"
        )

    return refuse


# ---------------------------------------------------------------- shapes


def results_of(graph: Graph, operands: Sequence[Any]) -> list[Any]:
    """Tensors like the results, of which nothing is computed. Sizes stay torch's symbols, but for computed ones."""
    torch = need_torch()
    device = next(o.device for t, o in zip(graph.inputs, operands, strict=True) if t.shape)
    sizes = sizes_of(graph, operands)

    def extent(size: Any) -> Any:
        if isinstance(size, Expr):
            return size_of(size, {name: int(number) for name, number in sizes.items()})
        return size if isinstance(size, int) else sizes[size.name]

    return [
        torch.empty([extent(size) for size in t.shape], dtype=torch_dtype(t.dtype), device=device)
        for t in graph.outputs
    ]


# ---------------------------------------------------------------- gradients


class TorchGradients(Gradients):
    """How a chain of gradients is called for an operator: what is saved for it, and what it is given."""

    def saved(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        values = {**dict(zip(self.inputs, inputs, strict=True)), **dict(zip(self.outputs, outputs, strict=True))}
        kept = [name for name in self.wanted if name in values and name not in self.numbers]
        ctx.save_for_backward(*(values[name] for name in kept))
        ctx.kept, ctx.numbers = kept, {name: values[name] for name in self.numbers}

    def computed(self, ctx: Any, *gradients: Any) -> Any:
        for needed, name in zip(ctx.needs_input_grad, self.inputs, strict=True):
            if needed and f"d{name}" not in self.made:
                raise RequestError(
                    f"{self.name}: {name} requires a gradient, and backward has no output d{name}\n"
                    f"  return it there, or pass {name}.detach()"
                )
        values = {**ctx.numbers, **dict(zip(ctx.kept, ctx.saved_tensors, strict=True))}
        for name, gradient in zip(self.outputs, gradients, strict=True):
            if gradient is None:  # of whole numbers
                continue
            apart = gradient.dim() and gradient.stride(-1) != 1  # as the one that .sum() gives
            values[f"d{name}"] = gradient.contiguous() if apart else gradient
        space, _, own = self.name.partition("::")
        found = getattr(getattr(need_torch().ops, space), f"{own}_backward")(*(values[name] for name in self.wanted))
        by_name = dict(zip(self.made, found if isinstance(found, tuple) else (found,), strict=True))
        return tuple(by_name.get(f"d{name}") for name in self.inputs)
