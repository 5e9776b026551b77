"""The kernels of one operator: its chain, compiled as row lengths come."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from fusegen.errors import ArgumentError
from fusegen.language.graph import Graph
from fusegen.language.spec import Chain
from fusegen.pipeline import compile as compiled
from fusegen.runtime import Kernel, Program
from fusegen.runtime.arguments import compiled_sizes, measure_dims

MOST_KERNELS = 32  # of one operator, for as many row lengths; the one that was compiled first goes
MOST_SHAPES = 1024  # for which an operator remembers its kernel


def sizes_of(graph: Graph, operands: Sequence[Any]) -> dict[str, Any]:
    """The size of every dim, from the operands' shapes. Raises ArgumentError where they don't fit."""
    shaped = {t.name: SimpleNamespace(shape=tuple(o.shape)) for t, o in zip(graph.inputs, operands, strict=True)
              if t.shape}  # fmt: skip
    return measure_dims(graph, {}, shaped)  # type: ignore[arg-type]  # of views, only their shapes


class Kernels:
    """The kernels of one chain. `options` are those of `fusegen.compile`."""

    def __init__(self, chain: Chain, options: Mapping[str, Any]) -> None:
        self.chain = chain
        self.graph = chain.graph
        self.options = options
        self.arrays = tuple(place for place, tensor in enumerate(self.graph.inputs) if tensor.shape)
        self.by_shapes: dict[tuple[Any, ...], Kernel | Program] = {}
        self.made: list[tuple[Mapping[str, int], Kernel | Program]] = []  # with the sizes that are constants of each
        self.only: Kernel | Program | None = None  # as long as there is one alone
        self.lock = threading.Lock()

    def call(self, *operands: Any, **out: Any) -> Any:
        """The results; with `out=` where they go. While there is one kernel it is asked without a look at the shapes,
        which costs as much as the call: it refuses those that are not its own before it does anything."""
        kernel = self.only
        if kernel is None:
            return self.of(operands)(*operands, **out)
        try:
            return kernel(*operands, **out)
        except ArgumentError:
            other = self.of(operands)
            if other is kernel:
                raise
        return other(*operands, **out)

    def known(self, operands: Sequence[Any]) -> Kernel | Program | None:
        """The kernel of an earlier call with operands of these shapes."""
        return self.only or self.by_shapes.get(self.shapes(operands))

    def shapes(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([operands[place].shape for place in self.arrays])

    def of(self, operands: Sequence[Any]) -> Kernel | Program:
        """The kernel for operands of these shapes."""
        shapes = self.shapes(operands)
        kernel = self.by_shapes.get(shapes)
        return self.found(shapes, operands) if kernel is None else kernel

    def found(self, shapes: tuple[Any, ...], operands: Sequence[Any]) -> Kernel | Program:
        """One that is there or compiled now, by one thread while others wait."""
        sizes = sizes_of(self.graph, operands)
        with self.lock:
            fits = (kernel for fixed, kernel in self.made if all(sizes[name] == fixed[name] for name in fixed))
            kernel = next(fits, None)
            if kernel is None:
                kernel = self.compiled(sizes)
                self.made.append((fixed_sizes(kernel), kernel))
                del self.made[:-MOST_KERNELS]
                self.only = kernel if len(self.made) == 1 else None
            if len(self.by_shapes) >= MOST_SHAPES:
                self.by_shapes.clear()
            self.by_shapes[shapes] = kernel
        return kernel

    def compiled(self, sizes: Mapping[str, int]) -> Kernel | Program:
        """At the row count that the chain declares, since the first call's may be that of a trial run."""
        rows = {str(size) for size in self.graph.shape[:-1]} - {str(size) for size in self.graph.fixed}
        kernel = self.at({name: size for name, size in sizes.items() if name not in rows})
        fixed = fixed_sizes(kernel)
        return kernel if all(sizes[name] == fixed[name] for name in fixed) else self.at(sizes)

    def at(self, sizes: Mapping[str, int]) -> Kernel | Program:
        kernel: Kernel | Program = compiled(self.chain.at(**sizes), **self.options)
        if isinstance(kernel, Program):
            kernel.one_length = True
        return kernel


def fixed_sizes(kernel: Kernel | Program) -> Mapping[str, int]:
    """The sizes that are constants of a kernel, by the chain's dims."""
    if isinstance(kernel, Program):
        return {name: kernel.plan.graph.sizes[name] for name in kernel.plan.fixed}
    return compiled_sizes(kernel.plan)
