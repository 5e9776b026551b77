"""Several steps of a program in one launch.

A step's plan assumes things of its arrays' layout, as a kernel's does. Where arrays lie otherwise, or outputs are
written over operands, the launch has a variant of its steps' plans for that; where these can't be one launch, and where
a grid would be too large, each step is a kernel of its own, which is compiled when it is first needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fusegen.language.types import i64
from fusegen.planner.model import Layout, Plan
from fusegen.planner.programs.side_by_side import JoinedPlan, JoinedSource
from fusegen.runtime import arguments
from fusegen.runtime.arrays import ArrayView, Place
from fusegen.runtime.called import relative_span, row_of
from fusegen.runtime.calls import JoinedVariant, Record
from fusegen.runtime.devices import Device, Launch, Loaded
from fusegen.runtime.kernel import Kernel

if TYPE_CHECKING:
    from fusegen.compiling import Binary, Resources

Layouts = tuple[Layout, ...]
Plans = tuple[Plan, ...]
Arrays = Mapping[str, ArrayView]


class Joined:
    """A launch of several steps on `device`. `replan(place, layout)` plans the step of that place for another layout;
    `variants(plans)` compiles the launch of such plans, or gives None where they can't be one; `alone(place)` makes the
    step's own kernel."""

    def __init__(
        self, source: JoinedSource, binary: Binary | None, device: Device, replan: Callable[[int, Layout], Plan],
        variants: Callable[[Plans], tuple[JoinedSource, Binary | None] | None], alone: Callable[[int], Kernel],
    ) -> None:  # fmt: skip
        self.main = JoinedVariant(source, binary)
        self.device = device
        self.replan = replan
        self.make_variant = variants
        self.make_alone = alone
        self.plans: dict[tuple[int, Layout], Plan] = {}
        self.variants: dict[Layouts, JoinedVariant | None] = {layouts_of(source.plan.plans): self.main}
        self.kernels: dict[int, Kernel] = {}
        self.loaded: dict[tuple[Layouts, Place], Loaded] = {}
        self.lock = threading.RLock()
        self.load(self.main, device)  # now, so that no first call inside a graph capture has to

    @property
    def source(self) -> JoinedSource:
        return self.main.source

    @property
    def plan(self) -> JoinedPlan:
        return self.main.plan

    @property
    def binary(self) -> Binary | None:
        return self.main.binary

    @property
    def resources(self) -> Resources | None:
        return self.main.binary.resources if self.main.binary else None

    @property
    def name(self) -> str:
        return self.plan.name

    def __repr__(self) -> str:
        return f"<Joined {self.name}, {self.plan.regime}, for {self.plan.target} on {self.device}>"

    # ---------------------------------------------------------------- its launches

    def records(
        self, arrays: Sequence[Arrays], device: Device, in_place: Sequence[arguments.Pairs]
    ) -> list[tuple[Record, tuple[int, ...]]]:
        """The launches over the steps' arrays, each with the places of the steps that it does: one of all, or one of
        each."""
        plans = tuple(
            self.fitting(place, own, pairs)
            for place, (own, pairs) in enumerate(zip(arrays, in_place, strict=True))
        )  # fmt: skip
        variant = self.variant(plans)
        if variant is not None and (found := self.record(variant, arrays, device)) is not None:
            return [(found, tuple(range(len(plans))))]
        alone = (
            self.alone(place).record(own, device, "fusegen", pairs)
            for place, (own, pairs) in enumerate(zip(arrays, in_place, strict=True))
        )
        return [(record, (place,)) for place, record in enumerate(alone)]

    def fitting(self, place: int, arrays: Arrays, in_place: arguments.Pairs) -> Plan:
        """The step's plan for arrays that lie like these."""
        plan = self.plan.plans[place]
        arguments.check_dtypes(plan.graph, arrays)
        arguments.measure(plan, arrays)
        while (layout := arguments.layout_needed(plan, arrays, in_place)) != plan.layout:
            with self.lock:
                if (place, layout) not in self.plans:
                    self.plans[place, layout] = self.replan(place, layout)
            plan = self.plans[place, layout]
        return plan

    def record(self, variant: JoinedVariant, arrays: Sequence[Arrays], device: Device) -> Record | None:
        """The launch of all steps; None where its grid would be too large."""
        parts = variant.plan.parts
        sizes = [arguments.measure(part, own) for part, own in zip(parts, arrays, strict=True)]
        extents = [arguments.extents_of(part, own) for part, own in zip(parts, sizes, strict=True)]
        counts = [part.blocks(*own) for part, own in zip(parts, extents, strict=True)]
        if (blocks := variant.plan.blocks(counts)) is None:
            return None
        bound = [arguments.bind(p, s, own) for p, s, own in zip(parts, sizes, arrays, strict=True)]
        numbers = [*(own.blocks for own in bound[: variant.plan.counted]), *(n for own in bound for n in own.numbers)]
        spans = tuple(relative_span(own[name]) for own in arrays for name in own)
        spans += tuple((0, (p.dtype or i64).bytes) for p in variant.plan.own_pointers)
        row = row_of("fusegen")
        return Record(
            variant=variant,
            device=device,
            loaded=self.load(variant, device) if blocks else None,
            launch=Launch(blocks, tuple(numbers), spans),
            makers=(),
            shapes=(),
            address=row.address,
            stream=row.stream(device.place),
            waits=row.waits,
            inputs=0,
        )

    def variant(self, plans: Plans) -> JoinedVariant | None:
        """One launch of these plans, compiled the first time it is asked for; None where there is none."""
        key = layouts_of(plans)
        with self.lock:
            if key not in self.variants:
                found = self.make_variant(plans)
                self.variants[key] = None if found is None else JoinedVariant(*found)
            return self.variants[key]

    def alone(self, place: int) -> Kernel:
        """The step's own kernel, compiled the first time it is asked for."""
        with self.lock:
            if place not in self.kernels:
                self.kernels[place] = self.make_alone(place)
            return self.kernels[place]

    def load(self, variant: JoinedVariant, device: Device) -> Loaded:
        """The variant on that device, loaded the first time it is asked for."""
        key = (layouts_of(variant.plan.plans), device.place)
        with self.lock:
            if key not in self.loaded:
                self.loaded[key] = device.load(variant.source, variant.binary)
            return self.loaded[key]


def layouts_of(plans: Sequence[Plan]) -> Layouts:
    return tuple(plan.layout for plan in plans)
