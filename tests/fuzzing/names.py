"""Names for operands and values: plain ones, and those that mean something to Python, C++, a compiler or a kernel."""

from __future__ import annotations

import keyword
import random

CPLUSPLUS = (
    "int double float char void bool long short signed unsigned auto const volatile register static struct union enum "
    "template typename typedef this new delete operator using namespace switch default goto sizeof extern inline "
    "restrict __restrict__ private public virtual friend constexpr static_assert nullptr alignas alignof decltype "
    "noexcept thread_local wchar_t requires concept co_await and_eq bitor compl not_eq xor asm int_ export mutable"
)
MACROS = "INFINITY NAN NULL EOF stdout errno linux unix assert INT_MAX FLT_MAX M_PI uint32_t size_t printf main"
DEVICE = (
    "threadIdx blockIdx gridDim blockDim warpSize float4 half __half bf16_ __shared__ __syncthreads fmaxf fabsf expf "
    "isnan wgmma cluster nan lane row col rows cols warp part store load Vec reciprocal larger smaller exponential "
    "row_sum warp_sum picker key live stage arrivals acc tile sums total mean x_ptr x_row x_stride x_vec x_T h_kept "
    "out out0 out1 out_ptr limit pivot centered v j i k y result columns top best pass_ first_row max_rows"
)
PYTHON = (
    "abs float sum len list tuple dict set sorted range print zip map any all round pow type id object property super "
    "min max iter next input vars exec eval hash repr match case _ __ self cls np numpy math bfloat16 erf inf "
    "reference take top_columns dtype astype shape take_columns __name__ __builtins__ __class__ Exception"
)
OTHER = f"X x Row ROW N_ M_ x1 O0 l {'a' * 120} größe"
AWKWARD = tuple(f"{CPLUSPLUS} {MACROS} {DEVICE} {PYTHON} {OTHER}".split())
SPECS_OWN = {"F", "chain", "dims", "b8", "bf16", "f16", "f32", "i32"}  # a spec that hides these means something else


class Names:
    """Names that are not taken yet. `awkward` draws many from the lists above."""

    def __init__(self, rng: random.Random, awkward: bool) -> None:
        self.random, self.awkward = rng, awkward
        self.taken = {*SPECS_OWN, "fuzz", *"BHSMNKL"}

    def new(self, stem: str) -> str:
        for _ in range(20):
            odd = self.awkward and self.random.random() < 0.7
            name = self.random.choice(AWKWARD) if odd else f"{stem}{len(self.taken)}"
            if name not in self.taken and not keyword.iskeyword(name):
                break
        else:
            name = f"{stem}{len(self.taken)}"
        self.taken.add(name)
        return name
