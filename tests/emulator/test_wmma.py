"""RDNA's WMMA in the emulator: where factors and sums lie, against numpy, and each way to get one wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fusegen.emulator import KernelFault
from fusegen.targets import RX7900XTX, RX9070XT, Target
from tests.emulator.test_matrices import NUMBERS, distinct, product
from tests.programs import Array, aligned, compile_all_for, launch
from tests.tools import BUILDS, needs_compiler

pytestmark = needs_compiler


@dataclass(frozen=True)
class Wmma:
    """One builtin: of gfx11, where lanes 16 to 31 repeat what lanes 0 to 15 have of the factors, or of gfx12."""

    name: str
    number: str
    other: str = ""  # what B is of, where it is another type

    def __str__(self) -> str:
        return self.name

    @property
    def later(self) -> bool:
        return self.name.endswith("_gfx12")

    @property
    def whole(self) -> bool:
        return self.number in ("s8", "u8")

    @property
    def values(self) -> int:
        """Of A and of B in a lane."""
        return 8 if self.later else 16

    @property
    def source(self) -> str:
        """d = a b + c, an element at a time, as the manuals say where each lies."""
        narrow = NUMBERS[self.number].itemsize == 1
        kind = "unsigned char" if narrow else {"f16": "_Float16", "bf16": "short"}[self.number]
        word, words = ("int", self.values // 4) if narrow else (kind, self.values)
        sums = "int" if self.whole else "float"
        depth = "lane / 16 * 8 + i" if self.later else "i"
        row = "lane / 16 * 8 + i" if self.later else "2 * i + lane / 16"
        signs = ["true" if number == "s8" else "false" for number in (self.number, self.other or self.number)]
        given = f"{signs[0]}, x, {signs[1]}, y, sums, false" if self.whole else "x, y, sums"
        return f"""
typedef {word} Values __attribute__((ext_vector_type({words})));
typedef {sums} Sums __attribute__((ext_vector_type(8)));
extern "C" __global__ void kernel(const {kind}* a, const {kind}* b, const {sums}* c, {sums}* d) {{
  const int lane = threadIdx.x, place = lane % 16;
  Values x, y;
  for (int i = 0; i < {self.values}; ++i) {{
    reinterpret_cast<{kind}*>(&x)[i] = a[place * 16 + {depth}];
    reinterpret_cast<{kind}*>(&y)[i] = b[({depth}) * 16 + place];
  }}
  Sums sums;
  for (int i = 0; i < 8; ++i) sums[i] = c[({row}) * 16 + place];
  sums = __builtin_amdgcn_wmma_{sums.replace("float", "f32").replace("int", "i32")}_16x16x16_{self.name}({given});
  for (int i = 0; i < 8; ++i) d[({row}) * 16 + place] = sums[i];
}}
"""


OCP = {"fp8": "e4m3", "bf8": "e5m2"}
OF_GFX11 = [Wmma("f16_w32", "f16"), Wmma("bf16_w32", "bf16"), Wmma("iu8_w32", "s8"), Wmma("iu8_w32", "u8", "s8")]
OF_GFX12 = [
    Wmma("f16_w32_gfx12", "f16"), Wmma("bf16_w32_gfx12", "bf16"), Wmma("iu8_w32_gfx12", "s8"),
    *(Wmma(f"{a}_{b}_w32_gfx12", OCP[a], OCP[b]) for a in OCP for b in OCP),
]  # fmt: skip


def run(wmma: Wmma, source: str, *, check: bool = False, warp: int = 32) -> tuple[Array, Array]:
    """What the kernel makes of it, and what numpy does."""
    kinds = NUMBERS[wmma.number], NUMBERS[wmma.other or wmma.number]
    a, b = distinct(16, 16, kinds[0], 1), distinct(16, 16, kinds[1], 2)
    if kinds[0].itemsize == 1:
        rng = np.random.default_rng(3)
        ends = {"s8": (-128, 128), "u8": (0, 256)}
        drawn = [rng.integers(*ends.get(number, (-8, 9)), (16, 16))
                 for number in (wmma.number, wmma.other or wmma.number)]  # fmt: skip
        a, b = (aligned(x.astype(kind)) for x, kind in zip(drawn, kinds, strict=True))
    sums = np.dtype(np.int32 if wmma.whole else np.float32)
    c, d = distinct(16, 16, sums, 3), aligned(np.full((16, 16), -1, sums))
    given = [x.view(np.uint8) if x.dtype.itemsize == 1 else x for x in (a, b)]
    launch(source, [*given, c, d], check=check, threads=32, warp=warp)
    return d, product(a, b, c).astype(sums)


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("wmma", [*OF_GFX11, *OF_GFX12], ids=lambda wmma: f"{wmma} {wmma.number}")
def test_wmma_multiplies(wmma: Wmma, check: bool) -> None:
    got, want = run(wmma, wmma.source, check=check)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("target", "own"), [(RX7900XTX, OF_GFX11), (RX9070XT, OF_GFX12)], ids=["gfx1100", "gfx1201"])
def test_wmma_is_hip(target: Target, own: list[Wmma]) -> None:
    compile_all_for(target, [wmma.source for wmma in own], threads=32)


@pytest.mark.parametrize(
    ("wmma", "right", "wrong"),
    [
        (OF_GFX11[0], "(2 * i + lane / 16)", "(lane / 16 * 8 + i)"),  # sums as gfx12 has them,
        (OF_GFX12[0], "d[(lane / 16 * 8 + i)", "d[(2 * i + lane / 16)"),  # and as gfx11 has them
        (
            OF_GFX12[0],
            "a[place * 16 + lane / 16 * 8 + i]",
            "a[place * 16 + (1 - lane / 16) * 8 + i]",
        ),  # halves of K swapped
        (OF_GFX11[0], "d[(2 * i + lane / 16)", "d[(2 * i + 1 - lane / 16)"),  # lanes swapped
    ],
)
def test_another_layout_gives_another_product(wmma: Wmma, right: str, wrong: str) -> None:
    assert right in wmma.source
    got, want = run(wmma, wmma.source.replace(right, wrong))
    assert not np.array_equal(got, want)


def test_lanes_that_share_a_row_have_the_same_of_it_on_gfx11() -> None:
    source = OF_GFX11[0].source.replace("a[place * 16 + i]", "a[place * 16 + (i + lane / 16) % 16]")
    with pytest.raises(KernelFault, match="lanes 0 and 16 have one row of WMMA's factors, and other numbers of it"):
        run(OF_GFX11[0], source)


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(KernelFault, match="no model of WMMA whose sums saturate"):
        run(OF_GFX11[2], OF_GFX11[2].source.replace("sums, false)", "sums, true)"))
    with pytest.raises(KernelFault, match="WMMA belongs to warps of 32 lanes, and this one has 64"):
        run(OF_GFX11[0], OF_GFX11[0].source, warp=64)
    with pytest.raises(KernelFault, match="lane 16 has ended"):
        run(OF_GFX12[0], OF_GFX12[0].source.replace("  sums = ", "  if (lane < 16) sums = "))
