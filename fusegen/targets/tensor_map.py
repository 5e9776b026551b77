"""What a tensor copy needs to know of a tensor in global memory: the host's side of a `CUtensorMap` argument.

A kernel takes it as `const __grid_constant__ CUtensorMap` and hands its address to cp.async.bulk.tensor, with the
coordinates of a box. The emulator reads it as it stands; for a GPU, `cuTensorMapEncodeTiled` makes 128 opaque bytes of
it, and `driver_arguments` has that function's arguments in its own order.

Sizes are in numpy's order, the contiguous axis last. The driver's, and a kernel's coordinates, are in the opposite one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusegen.errors import RequestError
from fusegen.language.types import DType

MAX_RANK = 5
MAX_SIZE = 1 << 32  # elements of an axis
MAX_STRIDE = 1 << 40  # bytes
MAX_BOX = 256  # elements of an axis
GRAIN = 16  # bytes: of the address, the strides and a box's lines
SWIZZLES = (0, 32, 64, 128)  # bytes


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor in global memory, and the box of it that one copy moves.

    `base` is its address, `shape` its sizes and `strides` the bytes from one element to the next along every axis but
    the last. `box` is the size of a copy. `swizzle` says in lines of how many bytes shared memory is permuted (0: not
    at all), and a box's line must then be just as long. What of a box lies outside the tensor is read as zeros and not
    written. Raises RequestError for what the driver (CUDA driver API, cuTensorMapEncodeTiled) would refuse.
    """

    name: str  # of the kernel's argument, for messages
    base: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        rank = len(self.shape)
        if not 1 <= rank <= MAX_RANK:
            raise self._refusal(f"has {rank} axes", f"1 to {MAX_RANK}")
        if len(self.strides) != rank - 1:
            raise self._refusal(
                f"has {len(self.strides)} strides for {rank} axes", "one for each axis but the last (contiguous)"
            )
        if len(self.box) != rank:
            raise self._refusal(f"has a box of {len(self.box)} axes and a tensor of {rank}", "the same number")
        if self.base <= 0 or self.base % GRAIN:
            raise self._refusal(f"lies at address {self.base:#x}", f"a multiple of {GRAIN}")
        for size in self.shape:
            if not 1 <= size <= MAX_SIZE:
                raise self._refusal(f"has an axis of {size} elements", "1 to 2^32")
        for stride in self.strides:
            if not 0 < stride < MAX_STRIDE or stride % GRAIN:
                raise self._refusal(f"has a stride of {stride} bytes", f"a multiple of {GRAIN} below 2^40")
        for size in self.box:
            if not 1 <= size <= MAX_BOX:
                raise self._refusal(f"has a box of {size} elements along an axis", f"1 to {MAX_BOX}")
        if self.line_bytes % GRAIN:
            raise self._refusal(f"has a box whose lines are {self.line_bytes} bytes", f"a multiple of {GRAIN}")
        if self.swizzle not in SWIZZLES:
            raise self._refusal(f"has a swizzle of {self.swizzle} bytes", ", ".join(map(str, SWIZZLES)))
        if self.swizzle and self.line_bytes != self.swizzle:
            raise self._refusal(
                f"has a box whose lines are {self.line_bytes} bytes, and a swizzle of {self.swizzle}",
                "lines as long as the swizzle; split a longer box into several copies",
            )

    @property
    def line_bytes(self) -> int:
        """Bytes of the box along the contiguous axis."""
        return self.box[-1] * self.dtype.bytes

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy brings, and that its mbarrier has to expect, whether or not the box juts out."""
        return math.prod(self.box) * self.dtype.bytes

    def driver_arguments(self) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Rank, globalDim, globalStrides (bytes), boxDim and elementStrides, the contiguous axis first."""
        rank = len(self.shape)
        return rank, self.shape[::-1], self.strides[::-1], self.box[::-1], (1,) * rank

    def _refusal(self, found: str, wanted: str) -> RequestError:
        return RequestError(f"the tensor map {self.name} {found}; a tensor copy needs {wanted}")
