"""A compiled kernel as a Python callable.

    y = kernel(x, bias, residual, gamma, beta)              # the caller's library, the caller's current stream
    kernel(x, bias, residual, gamma, beta, out=y)           # into memory of your own

The first call with arrays of given shapes, strides, dtypes, alignment and device checks everything and writes down a
`Record`: which variant of the kernel, its grid, its numbers. Later calls like it look the record up, allocate the
result and launch; only addresses and run-time scalars differ. Calls on torch tensors that come back a second time get
a function of their own, which does no more than it must (`fusegen.runtime.shortcuts`) and which the kernel's calls then
go to at once.

A plan assumes things of its operands' layout. Arrays that are laid out otherwise get a variant of the kernel, planned
and compiled when it is first needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fusegen.errors import ArgumentError, KernelError, RequestError
from fusegen.planner.model import Layout, Plan, Source
from fusegen.runtime import arguments
from fusegen.runtime.arrays import ArrayView, Place
from fusegen.runtime.called import WIDEST, Called, fresh_view, relative_span, row_of
from fusegen.runtime.calls import Prepared, Record, Variant
from fusegen.runtime.devices import Device, Launch, Loaded
from fusegen.runtime.signatures import Signature, fast_signature

if TYPE_CHECKING:
    from fusegen.compiling import Binary, Resources

log = logging.getLogger("fusegen.kernel")

Variants = Callable[[Layout], "tuple[Source, Binary | None]"]


class Kernel(Called):
    """A chain, planned, compiled and ready to run on `device`: `kernel(x, y)` is `kernel.call(x, y)`, but faster.

    `variants(layout)` plans and compiles the chain for another layout.
    """

    def __init__(self, source: Source, binary: Binary | None, device: Device, variants: Variants) -> None:
        super().__init__(source.plan.graph, source.plan.target, device)
        self.gate: tuple[Any, ...] = ()  # what the gate said of each candidate, set by the pipeline
        self.choice: Any = None  # why the candidates were tried in that order, set by the pipeline
        self.make_variant = variants
        self.main = Variant(source, binary)
        self.variants: dict[Layout, Variant] = {source.plan.layout: self.main}
        self.loaded: dict[tuple[Layout, Place], Loaded] = {}
        self.records: dict[Signature, Record] = {}
        self.load(self.main, device)  # now, so that no first call inside a graph capture has to

    # ---------------------------------------------------------------- what it is

    @property
    def source(self) -> Source:
        return self.main.source

    @property
    def plan(self) -> Plan:
        return self.main.plan

    @property
    def binary(self) -> Binary | None:
        return self.main.binary

    @property
    def resources(self) -> Resources | None:
        """Registers, spills and memory; None for an emulated kernel, which no GPU's compiler has seen."""
        return self.main.binary.resources if self.main.binary else None

    def __repr__(self) -> str:
        return f"<Kernel {self.name} {self.plan.graph.signature} for {self.target} on {self.device}>"

    # ---------------------------------------------------------------- calling it

    def call(self, /, *operands: Any, out: Any = None, stream: object = None, **named: Any) -> Any:
        """Run the kernel; returns its output, or a tuple of them. Takes no shortcut: finds the record of like calls, or
        checks from the ground up.

        Operands come in the spec's order, or by the names they have there (an operand that is itself called `out` or
        `stream` in its place only), which takes some 3 us more: arrays, and numbers for run-time scalars. `out`:
        an array, or a tuple of them, to write into. `stream`: where to launch; else the current stream of the first
        array's library. On a GPU the call returns before the kernel is done; arrays on the CPU are copied there and
        back, complete on return.

        Raises ArgumentError, with nothing launched, for operands that the kernel can't take, and KernelError when the
        launch is refused.
        """
        if named:  # once more, in order: what repeats may have a shortcut
            return self(*self.in_order(operands, named), out=out, stream=stream)
        arrays, values = self.split(operands)
        outs = () if out is None else self.split_out(out)
        signature = None
        if stream is None and (found := fast_signature((*arrays, *outs), WIDEST)) is not None:
            signature, pointers = found
            record = self.records.get(signature)
            if outs and (record is None or not record.apart(pointers)):
                record = self.records.get((signature, same_places(pointers, len(arrays))))
                if record is not None and record.apart(pointers):
                    record.run(pointers, values, record.stream())
                    return out
            elif record is not None:
                if self.shortcuts.learn(record, arrays, outs, pointers):
                    self.forward(self.shortcuts.first, self.held)
                if not outs:
                    made = tuple([maker(arrays, None) for maker in record.makers])
                    record.run((*pointers, *map(record.address, made)), values, record.stream())
                    return made[0] if len(made) == 1 else made
                record.run(pointers, values, record.stream())
                return out
        return self.call_first(arrays, values, outs, stream, signature)

    # ---------------------------------------------------------------- records and variants

    def check(self, views: Mapping[str, ArrayView]) -> arguments.Sizes:
        """Everything that can be wrong whatever the layout and the addresses."""
        sizes = arguments.measure(self.plan, views)
        arguments.check_dtypes(self.plan.graph, views)
        arguments.check_strides(self.plan, views)
        return sizes

    def prepared(self, *given: Any) -> Prepared:
        """Raises ArgumentError for a step of a program whose operands are parts of one array: which of its elements
        they are is the program's to say, and no record of a call's addresses."""
        if within := " and ".join(f"{part} as columns of {whole}" for part, whole in sorted(self.plan.layout.within)):
            raise ArgumentError(f"{self.name} takes {within}: call its program")
        if self.plan.layout.interleaved:
            names = "; ".join(" and ".join(group) for group in sorted(self.plan.layout.interleaved))
            raise ArgumentError(f"{self.name} takes elements of one array by turns, {names}: call its program")
        return super().prepared(*given)

    @property
    def in_place(self) -> arguments.Pairs:
        return self.plan.in_place

    def record(
        self, views: Mapping[str, ArrayView], device: Device, owner: str, in_place: arguments.Pairs = frozenset()
    ) -> Record:
        """Check the arrays, find the variant that fits them, and work out its launch."""
        sizes = self.check(views)
        fresh = {t.name: fresh_view(t.dtype, sizes.of(t)) for t in self.outputs}
        whole = {**fresh, **views}
        variant = self.variant_for(whole, in_place)
        if variant is not self.main:
            arguments.measure(variant.plan, views)  # a flat plan takes any row length, a plan by rows only its own
        bound = arguments.bind(variant.plan, sizes, whole)
        spans = tuple(relative_span(whole[name]) for name in self.names)
        loaded = self.load(variant, device) if bound.blocks else None
        blocks = bound.blocks
        if loaded is not None and variant.plan.persistent_rows:
            blocks = variant.plan.blocks(bound.rows, resident=loaded.resident)
        own_outputs = any(t.name not in views for t in self.outputs)
        row = row_of(owner)
        return Record(
            variant=variant,
            device=device,
            loaded=loaded,
            launch=Launch(blocks, bound.numbers, spans, bound.maps),
            shapes=tuple(f.shape for f in fresh.values()),
            makers=tuple(self.maker(owner, views, f, device) for f in fresh.values()) if own_outputs else (),
            address=row.address,
            stream=row.stream(device.place),
            waits=row.waits,
            inputs=len(self.inputs),
            in_place=self.places(in_place),
        )

    def variant_for(self, views: Mapping[str, ArrayView], in_place: arguments.Pairs = frozenset()) -> Variant:
        """The variant whose plan takes these arrays. A plan says what they lack, and whoever made the kernel makes the
        variant for a layout without that."""
        variant = self.main
        while (layout := arguments.layout_needed(variant.plan, views, in_place)) != variant.plan.layout:
            variant = self.variant(layout)
        return variant

    def variant(self, layout: Layout) -> Variant:
        """The kernel for `layout`, planned and compiled the first time it is asked for."""
        with self.lock:
            if layout not in self.variants:
                log.debug("%s: making the variant for %s", self.name, layout_text(layout))
                source, binary = self.make_variant(layout)
                if source.plan.layout != layout:
                    raise KernelError(f"{self.name}: asked for {layout} and got a plan for {source.plan.layout}")
                self.variants[layout] = Variant(source, binary)
            return self.variants[layout]

    def load(self, variant: Variant, device: Device) -> Loaded:
        """The variant on that device, loaded the first time it is asked for."""
        key = (variant.plan.layout, device.place)
        with self.lock:
            if key not in self.loaded:
                self.check_plan(variant.plan)
                self.loaded[key] = device.load(variant.source, variant.binary)
            return self.loaded[key]

    def check_plan(self, plan: Plan) -> None:
        """Launches hand pointers and values over in the spec's order, so must the plan take them; records tell
        addresses apart up to WIDEST bytes, so no access may be wider."""
        pointers = tuple(p.tensor for p in plan.params if p.kind in ("pointer", "map"))
        values = tuple(p.tensor for p in plan.params if p.kind == "value")
        wanted = tuple(t.name for t in self.operands if not t.shape)
        if (pointers, values) != (self.names, wanted):
            raise KernelError(f"{self.name}: the plan takes {pointers} and {values}, not {self.names} and {wanted}")
        if any(access.vector_bytes > WIDEST for access in plan.accesses):
            raise KernelError(f"{self.name}: the plan has vectors of over {WIDEST} bytes, which records don't expect")


def same_places(pointers: Sequence[int], inputs: int) -> frozenset[tuple[int, int]]:
    """The outputs that are where an input is: (output, input)."""
    both = ((output, operand) for output in range(inputs, len(pointers)) for operand in range(inputs))
    return frozenset(pair for pair in both if pointers[pair[0]] == pointers[pair[1]])


def need_kernel(given: object, verb: str) -> None:
    """Raises RequestError where `verb` was given something else for a kernel, such as a chain."""
    if (kernels := getattr(given, "kernels", None)) is not None:
        raise RequestError(f"{verb} takes one kernel, and {given!r} has {len(kernels)}\n  pass one of its `kernels`")
    if not isinstance(given, Kernel):
        raise RequestError(f"{verb} takes a kernel, and {given!r} is none\n  fusegen.compile(chain) makes one")


def layout_text(layout: Layout) -> str:
    """`split rows, x and bias unaligned, w transposed`."""
    parts = ["split rows"] if layout.split else []
    if layout.unaligned:
        parts.append(f"{' and '.join(sorted(layout.unaligned))} unaligned")
    if layout.in_place:
        parts.append(" and ".join(f"{output} over {operand}" for output, operand in sorted(layout.in_place)))
    if layout.transposed:
        parts.append(f"{' and '.join(sorted(layout.transposed))} transposed")
    if layout.apart:
        parts.append(f"elements of rows apart in {' and '.join(sorted(layout.apart))}")
    parts += [f"{' and '.join(names)} interleaved" for names in sorted(layout.interleaved)]
    parts += [f"{part} the first columns of {whole}" for part, whole in sorted(layout.within)]
    return ", ".join(parts) or "contiguous arrays"
