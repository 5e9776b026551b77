"""Calls of an operator that go straight to its kernel, past torch's dispatcher.

    straight(packet, kernels)     from now on, those of torch.ops.mylib.add_rmsnorm and its .default

The dispatcher looks up a schema, packs operands, asks for gradients and modes, takes Python's lock, and unpacks: more
than a launch takes. Most calls of a model that runs have nothing to find there. So before an operator stand shortcuts
(`fusegen.runtime.shortcuts`) of its own, in C, each for calls like one that the dispatcher has let through: tensors of
the same kind, with no gradient wanted, and nothing that watches torch's operators: no mode (of dispatch, of functions,
of fake tensors), no transform, no autocast, no profiler, no hook. All other calls take the dispatcher, and so do those
of programs, of kernels that take tensor maps, on AMD GPUs and in the emulator, for which there is no shortcut in C.

What stands before it is the operator's `_op`, the function that OpOverload and OpOverloadPacket call; a torch without
one is left as it is. The figures: docs/measured.md, "Calls".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fusegen.operators import Kernels
from fusegen.runtime import Kernel
from fusegen.runtime.called import WIDEST
from fusegen.runtime.calls import Forwarded
from fusegen.runtime.shortcuts import Shortcuts
from fusegen.runtime.signatures import fast_signature

log = logging.getLogger("fusegen.shortcuts")


class Straight:
    """The shortcuts of one operator, which its overload and its packet share. `filling`: it takes tensors for its
    outputs behind its operands."""

    def __init__(self, kernels: Kernels, filling: bool) -> None:
        import torch

        graph = kernels.graph
        self.kernels = kernels
        self.count = len(graph.inputs)
        self.outputs = len(graph.outputs) if filling else 0
        self.types = torch.Tensor, torch.nn.Parameter
        self.shortcuts = Shortcuts(graph, WIDEST, dispatched)
        self.entries: list[tuple[Forwarded, Dispatcher]] = []

    def stand_before(self, dispatcher: Callable[..., Any]) -> Forwarded:
        """What to call instead of `dispatcher`."""
        entry = Forwarded()
        self.entries.append((entry, Dispatcher(self, dispatcher)))
        self.forward()
        return entry

    def forward(self) -> None:
        for entry, dispatcher in self.entries:
            entry.forward(self.shortcuts.first, dispatcher)

    def learn(self, operands: tuple[Any, ...]) -> None:
        """The dispatcher has let these operands through: make a shortcut for others like them, where there can be
        one."""
        if len(operands) != self.count + self.outputs or not self.shortcuts.due():
            return
        operands, outs = operands[: self.count], operands[self.count :]
        arrays = tuple([operands[place] for place in self.kernels.arrays])
        if not all(type(array) in self.types for array in (*arrays, *outs)):
            return  # one that only stands for a tensor, say
        kernel = self.kernels.known(operands)
        found = fast_signature((*arrays, *outs), WIDEST)
        if not isinstance(kernel, Kernel) or found is None:
            return
        signature, pointers = found
        record = kernel.records.get(signature)
        if record is not None and self.shortcuts.make(record, arrays, outs, pointers, operator=True):
            self.forward()


class Dispatcher:
    """Torch's way to an operator, as a shortcut is handed it: not what stands before it (`Forwarded.forward`)."""

    __slots__ = ("call", "straight")

    def __init__(self, straight: Straight, call: Callable[..., Any]) -> None:
        self.straight = straight
        self.call = call


def dispatched(dispatcher: Dispatcher, /, *operands: Any, **named: Any) -> Any:
    """A call that takes no shortcut."""
    results = dispatcher.call(*operands, **named)
    if not named:
        dispatcher.straight.learn(operands)
    return results


def straight(packet: Any, kernels: Kernels, filling: bool = False) -> None:
    """Let calls of an operator go straight to its kernel where nothing else has to see them.

    `filling`: of one that takes its outputs too. It has to be before anybody has the operator, whose hash is its
    `_op`'s.
    """
    import torch

    found = Straight(kernels, filling)
    for way in packet.default, packet:
        given = getattr(way, "_op", None)
        if not callable(given):
            log.debug("operators take torch's dispatcher: those of torch %s have no _op", torch.__version__)
            return
        way._op = found.stand_before(given)
