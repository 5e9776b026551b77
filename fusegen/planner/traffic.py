"""What a plan moves, computes and is expected to take: the figures that planners rank by and people read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TensorTraffic:
    """Bytes of one tensor, by each way of counting (see Traffic)."""

    tensor: str
    output: bool
    ideal: int
    moved: int
    per_element: int
    times: float = 1  # times it is asked for; what is beyond `moved` comes from the L2 cache


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and operations of one launch at the default sizes.

    `ideal`: each input once, each output once. `moved`: what this plan asks of DRAM (a streamed row is read again).
    `per_element_*`: the model that counts every operand once for every element, unfused and fused, as papers do.
    `unfused`: the user's operators as one kernel each, vectors read once. Of a chain with matrix products,
    `per_element_*` are the bytes with each product a kernel apart, and the ideal (see `planner.product_cost`).
    """

    tensors: tuple[TensorTraffic, ...]
    ideal: int
    moved: int
    unfused: int
    per_element_fused: int
    per_element_unfused: int
    flops: int
    special: int  # exponentials, roots and divisions among them, in calls
    launches_unfused: int
    bytes_per_element_fused: float
    bytes_per_element_unfused: float
    product_flops: int = 0  # those of matrix products among `flops`

    @property
    def intensity(self) -> float:
        """flop per byte moved; of a chain with matrix products, theirs."""
        return (self.product_flops or self.flops) / self.moved if self.moved else 0.0

    @property
    def intensity_apart(self) -> float:
        """The same with each product a kernel apart."""
        return self.product_flops / self.per_element_unfused if self.per_element_unfused else 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What the planner ranks by. `floor_us`: the fewest bytes at the data sheet's rate; `time_us`: this plan's.

    `bound` says what takes the time: memory, the arithmetic of products, or where there are none a warp's instructions,
    most of which are no arithmetic.
    """

    traffic: Traffic
    floor_us: float
    time_us: float
    bound: Literal["memory", "compute", "instruction"]
    in_flight_bytes: int  # loads outstanding in one SM when every resident block has issued its own
    registers: int  # estimated, per thread
    blocks_per_sm: int  # by the estimate
