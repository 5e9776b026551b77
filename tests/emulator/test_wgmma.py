"""wgmma in the emulator: every layout of its operands, and each way to wait for it wrongly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fusegen.emulator import EmulatorBuildError, KernelFault, build
from fusegen.targets import H200
from tests.programs import Array, aligned, compile_all_for, launch
from tests.tools import BUILDS, needs_check, needs_compiler

pytestmark = needs_compiler

NUMBERS = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "tf32": np.dtype(np.float32),
           "e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2),
           "s8": np.dtype(np.int8), "u8": np.dtype(np.uint8)}  # fmt: skip
SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}  # bytes: the field of a descriptor


def shared_image(matrix: Array, swizzle: int, transposed: bool) -> tuple[Array, int, int]:
    """A matrix (rows, depth) as it lies in shared memory, with its leading and stride byte offsets.

    Said as people draw it: atoms of 8 lines, each `swizzle` bytes long, whose pieces of 16 bytes are permuted by the
    line's number. Lines run along K, or along the rows where `transposed`.
    """
    lines = matrix.T if transposed else matrix
    count, length = lines.shape
    size = matrix.itemsize
    span, each = (swizzle or 16) // size, 16 // size  # numbers of a line of an atom, and of a piece
    bars = lines.reshape(count // 8, 8, length // span, span)
    pieces = bars.transpose(2, 0, 1, 3).reshape(length // span, count // 8, 8, span // each, each)
    image = np.empty_like(pieces)
    shift = {128: 0, 64: 1, 32: 2}.get(swizzle, 3)  # how many lines share 128 bytes, as a power of two
    for line in range(8):
        for piece in range(span // each):
            image[:, :, line, piece ^ line >> shift & (span // each - 1)] = pieces[:, :, line, piece]
    beside, below = count * span * size, 8 * span * size  # the next column of atoms, the next atom
    if transposed and not swizzle:
        return image.ravel(), below, beside
    return image.ravel(), beside, below


@dataclass(frozen=True)
class Wgmma:
    number: str
    n: int
    swizzle: int = 128
    trans_a: bool = False
    trans_b: bool = False
    registers: bool = False
    steps: int = 0
    scale_a: int = 1
    scale_b: int = 1
    other: str = ""  # what B is of, where it is another type

    def __str__(self) -> str:
        a = "registers" if self.registers else "columns" if self.trans_a else "rows"
        return f"{self.number} n{self.n} {self.swizzle} {a} {'columns' if self.trans_b else 'rows'}"

    @property
    def k(self) -> int:
        """Of one instruction."""
        return 32 // int(NUMBERS[self.number].itemsize)

    @property
    def whole(self) -> bool:
        return self.number in ("s8", "u8")

    @property
    def depth(self) -> int:
        """A line's length where the depth is contiguous, two instructions' otherwise."""
        own = self.swizzle and not (self.trans_a and self.trans_b)
        return self.swizzle * self.k // 32 if own else 2 * self.k

    def matrices(self) -> tuple[Array, Array]:
        rng = np.random.default_rng(self.n)
        kinds = NUMBERS[self.number], NUMBERS[self.other or self.number]
        least, most = (-128, 128) if self.whole else (-8, 9)
        if self.number == "u8":
            least, most = 0, 256
        return tuple(
            rng.integers(least, most, shape).astype(kind)
            for shape, kind in zip(((64, self.depth), (self.n, self.depth)), kinds, strict=True)
        )  # type: ignore[return-value]

    def advance(self, transposed: bool, lines: int, stride: int) -> int:
        """Bytes from one step along K to the next."""
        if transposed:
            return 2 * stride if self.swizzle else 2 * 8 * 16
        return 32 if self.swizzle else 2 * lines * 16

    def source(self, after: str = "") -> str:
        half = self.n // 2
        a, b = self.matrices()
        image_a, leading_a, stride_a = shared_image(a, self.swizzle, self.trans_a)
        _, leading_b, stride_b = shared_image(b, self.swizzle, self.trans_b)
        offset_b = 0 if self.registers else image_a.nbytes
        total = offset_b + b.nbytes
        sums = ", ".join(f"%{i}" for i in range(half))
        outputs = ", ".join(f'"+{"r" if self.whole else "f"}"(d[{i}])' for i in range(half))
        if self.registers:
            left = "{" + ", ".join(f"%{half + i}" for i in range(4)) + "}"
            left_in = ", ".join(f'"r"(a[{i}])' for i in range(4))
            parameter, rest, immediates = "const unsigned (&a)[4]", half + 4, f"{int(self.trans_b)}"
        else:
            left, left_in, parameter, rest = f"%{half}", '"l"(a)', "unsigned long long a", half + 1
            immediates = f"{int(self.trans_a)}, {int(self.trans_b)}"
        size = NUMBERS[self.number].itemsize
        word = {1: "unsigned char", 2: "unsigned short", 4: "unsigned"}[size]
        immediates = f", {immediates}" if size == 2 else ""
        scales = "" if self.whole else f", {self.scale_a}, {self.scale_b}"
        sum_type, kind = ("int", "s32") if self.whole else ("float", "f32")
        name = f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}.{kind}.{self.number}.{self.other or self.number}"
        steps = self.steps or self.depth // self.k
        advance_a, advance_b = self.advance(self.trans_a, 64, stride_a), self.advance(self.trans_b, self.n, stride_b)
        call = (
            "for (int i = 0; i < 4; ++i) fragments[step][i] = *reinterpret_cast<const unsigned*>("
            f"left + (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i % 2 * 8) * {self.depth} + step * {self.k} + "
            f"threadIdx.x % 4 * {4 // size} + i / 2 * {self.k // 2});\n    multiply(d, fragments[step], "
            if self.registers
            else f"multiply(d, describe(place + step * {advance_a}, {leading_a}, {stride_a}), "
        )
        return f"""
__device__ __forceinline__ unsigned long long describe(unsigned place, int leading, int stride) {{
  return (place & 0x3ffff) >> 4 | static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(stride >> 4) << 32 | {SWIZZLES[self.swizzle]}ull << 62;
}}
__device__ __forceinline__ void multiply({sum_type} (&d)[{half}], {parameter}, unsigned long long b, int adds) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{rest + 1}, 0;\\n" // WGMMA
               "{name} {{{sums}}}, {left}, %{rest}, p{scales}{immediates};\\n}}"
               : {outputs} : {left_in}, "l"(b), "r"(adds));
}}
__device__ __forceinline__ void fence() {{ asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }}
__device__ __forceinline__ void commit() {{ asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }}
template <int Left>
__device__ __forceinline__ void wait() {{ asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(Left) : "memory"); }}

extern "C" __global__ void __launch_bounds__(128) kernel(const uint4* image, const {word}* left, {sum_type}* out) {{
  extern __shared__ __align__(1024) unsigned char tile[];
  uint4* const pieces = reinterpret_cast<uint4*>(tile);
  for (int i = threadIdx.x; i < {total // 16}; i += 128) pieces[i] = image[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads(); // WRITTEN
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  {sum_type} d[{half}];
  for (int i = 0; i < {half}; ++i) d[i] = 1000;
  {f"unsigned fragments[{steps}][4];" if self.registers else ""}
  fence(); // FENCE
  for (int step = 0; step < {steps}; ++step) {{
    {call}describe(place + {offset_b} + step * {advance_b}, {leading_b}, {stride_b}), 1);
  }}
  commit(); // COMMIT
  wait<0>(); // WAIT
  {after}
  for (int i = 0; i < {half}; ++i) {{
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
    out[row * {self.n} + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = d[i]; // READ
  }}
}}
"""

    def run(self, source: str, *, check: bool, seed: int) -> tuple[Array, Array]:
        a, b = self.matrices()
        images = [shared_image(b, self.swizzle, self.trans_b)[0].view(np.uint8)]
        if not self.registers:
            images.insert(0, shared_image(a, self.swizzle, self.trans_a)[0].view(np.uint8))
        image = aligned(np.concatenate(images))
        kind = np.int32 if self.whole else np.float32
        out = aligned(np.zeros((64, self.n), kind) if self.whole else np.full((64, self.n), np.nan, kind))
        left = aligned(np.ascontiguousarray(a).view(f"u{a.itemsize}"))
        launch(source, [image, left, out], check=check, seed=seed, shared_bytes=image.nbytes)
        used = self.k * (self.steps or self.depth // self.k)
        exact = a[:, :used].astype(np.float64) @ b[:, :used].astype(np.float64).T
        return out, (1000 + self.scale_a * self.scale_b * exact).astype(kind)


LAYOUTS = [
    *(Wgmma("bf16", 64, swizzle) for swizzle in SWIZZLES),
    *(Wgmma("f16", 64, swizzle, trans_b=True) for swizzle in SWIZZLES),
    *(Wgmma("f16", 64, swizzle, trans_a=True) for swizzle in SWIZZLES),
    *(Wgmma("bf16", 128, swizzle, trans_a=True, trans_b=True) for swizzle in SWIZZLES),
    *(Wgmma("f16", n) for n in (8, 24, 136, 256)),
    Wgmma("bf16", 256, trans_b=True),
    Wgmma("bf16", 32, registers=True),
    Wgmma("f16", 64, registers=True, trans_b=True),
    *(Wgmma("tf32", 64, swizzle) for swizzle in SWIZZLES),
    Wgmma("tf32", 256),
    Wgmma("tf32", 32, registers=True),
    Wgmma("f16", 8, scale_a=-1),
    Wgmma("f16", 8, scale_b=-1),
    *(Wgmma("e4m3", 64, swizzle, other="e5m2") for swizzle in SWIZZLES),
    *(Wgmma("s8", 64, swizzle) for swizzle in SWIZZLES),
    Wgmma("e5m2", 256, other="e4m3"),
    Wgmma("e4m3", 8, scale_a=-1),
    Wgmma("e5m2", 16, registers=True),
    Wgmma("u8", 256),
    Wgmma("s8", 32, registers=True),
]


def test_tf32_takes_no_notice_of_the_low_bits() -> None:
    class Noisy(Wgmma):
        def matrices(self) -> tuple[Array, Array]:
            a, b = super().matrices()
            return tuple((each.view(np.uint32) | np.uint32(0x1FFF)).view(np.float32) for each in (a, b))  # type: ignore

    clean, noisy = Wgmma("tf32", 64), Noisy("tf32", 64)
    got, _ = noisy.run(noisy.source(), check=False, seed=0)
    _, want = clean.run(clean.source(), check=False, seed=0)
    assert np.array_equal(got, want)


def cut_off(x: Array) -> Array:
    """14 significant bits, towards zero."""
    unit = np.exp2(np.floor(np.log2(np.where(x == 0, 1.0, np.abs(x)))) - 13)
    return np.asarray(np.trunc(x / unit) * unit)


def test_sums_of_8_bit_floats_are_14_bits_wide() -> None:
    """Products and the sum before them lose what lies 13 bits below the first one of the largest."""
    one = Wgmma("e4m3", 16)
    rng = np.random.default_rng(3)
    a, b = (
        (rng.standard_normal(each.shape) * np.exp2(rng.integers(-4, 5, each.shape))).astype(each.dtype)
        for each in one.matrices()
    )

    class Wide(Wgmma):
        def matrices(self) -> tuple[Array, Array]:
            return a, b

    wide = Wide("e4m3", 16)
    got, _ = wide.run(wide.source(), check=False, seed=0)
    total = np.full((64, 16), 1000.0)
    for k in range(0, a.shape[1], one.k):
        left, right = a[:, k : k + one.k].astype(np.float64), b[:, k : k + one.k].astype(np.float64)
        terms = np.concatenate([left[:, None] * right[None], total[..., None]], -1)
        unit = np.exp2(np.floor(np.log2(np.abs(terms).max(-1))) - 13)
        total = cut_off((np.trunc(terms / unit[..., None]) * unit[..., None]).sum(-1))
    assert np.array_equal(got, total.astype(np.float32))
    exact = 1000 + a.astype(np.float64) @ b.astype(np.float64).T
    assert 0.02 < np.abs(got - exact).max() < 2.0, "an ulp at 1000 is 1/16"


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("wgmma", LAYOUTS, ids=str)
def test_every_layout(wgmma: Wgmma, check: bool) -> None:
    for seed in (0, 1):
        got, want = wgmma.run(wgmma.source(), check=check, seed=seed)
        assert np.array_equal(got, want), seed


def test_the_layouts_are_cuda() -> None:
    compile_all_for(H200, [wgmma.source() for wgmma in LAYOUTS])


PLAIN = Wgmma("bf16", 32)


def changed(*pairs: tuple[str, str], wgmma: Wgmma = PLAIN) -> str:
    source = wgmma.source()
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize("check", BUILDS)
def test_another_swizzle_gives_other_numbers(check: bool) -> None:
    for other in (2, 3):
        got, want = PLAIN.run(changed(("1ull << 62", f"{other}ull << 62")), check=check, seed=0)
        assert not np.array_equal(got, want)


BROKEN = [
    (
        "no fence between the proxies",
        [("fence.proxy.async.shared::cta;", "")],
        "race",
        "written by a plain store: fence.proxy.async must come between",
        "WGMMA",
    ),
    (
        "a fence on the other side of the stores",
        [
            ("for (int i = threadIdx.x; i <", 'asm volatile("fence.proxy.async;");\n  for (int i = threadIdx.x; i <'),
            ("fence.proxy.async.shared::cta;", ""),
        ],
        "race",
        "fence.proxy.async must come between",
        "WGMMA",
    ),
    (
        "no wait",
        [("  wait<0>(); // WAIT\n", "")],
        "race",
        "accumulator of a wgmma.mma_async that this thread has not",
        "READ",
    ),
    *(
        (
            f"accumulator {which} is touched before the wait",
            [("wait<0>(); // WAIT", f"d[{which}] += 1.0f; // BUG\n  wait<0>();")],
            "race",
            "accumulator of a wgmma.mma_async that this thread has not",
            "BUG",
        )
        for which in (0, 7, 15)
    ),
    (
        "a wait for the group before",
        [("wait<0>(); // WAIT", "wait<1>();")],
        "race",
        "that this thread has not waited",
        "READ",
    ),
    ("no commit", [("  commit(); // COMMIT\n", "")], "race", "that this thread has not waited for", "READ"),
    ("no fence", [("  fence(); // FENCE\n", "")], "race", "wgmma.fence must come between", "WGMMA"),
    (
        "no barrier in front",
        [("  __syncthreads(); // WRITTEN\n", "")],
        "race",
        "is not ordered with the write",
        "WGMMA|piece",
    ),
    (
        "the tile is written before the wait",
        [("wait<0>(); // WAIT", "tile[threadIdx.x] = 0; // BUG\n  wait<0>();")],
        "race",
        "while a wgmma.mma_async that nobody has waited for may still be reading it",
        "BUG",
    ),
    (
        "written by a thread that has not heard of the wait",
        [("wait<0>(); // WAIT", "if (threadIdx.x < 32) tile[0] = 0; else { wait<0>(); } // BUG\n  wait<0>();")],
        "race",
        "wgmma.mma_async",
        "BUG",
    ),
    (
        "a descriptor with stray bits",
        [("1ull << 62;", "1ull << 62 | 1ull << 55;")],
        "tensor",
        "bits are set that must be",
        "WGMMA",
    ),
    (
        "a base offset",
        [("1ull << 62;", "1ull << 62 | 1ull << 49;")],
        "tensor",
        "base offset, which the emulator",
        "WGMMA",
    ),
    (
        "a tile beyond the end",
        [("describe(place +", "describe(place + 65536 +")],
        "out-of-bounds",
        "read of 16 bytes at",
        "WGMMA",
    ),
    (
        "a warp is missing",
        [("  fence(); // FENCE", "  if (threadIdx.x >= 96) return;\n  fence();")],
        "deadlock",
        "for thread (96, 0, 0) of its warpgroup, which has ended",
        "WGMMA",
    ),
    (
        "a warp gives another predicate",
        [(", 1);\n  }\n  commit", ", threadIdx.x < 96);\n  }\n  commit")],
        "divergent-warp",
        "another descriptor, predicate or immediate",
        "WGMMA",
    ),
    (
        "the thread ends before the wait",
        [("  wait<0>(); // WAIT\n", "  return;\n")],
        "race",
        "the thread ends while this",
        "WGMMA",
    ),
    ("a scale of two", [("p, 1, 1", "p, 1, 2")], "tensor", "a scale of 2 for wgmma", "WGMMA"),
]
FRAGMENTS = Wgmma("bf16", 32, registers=True)
OVERWRITTEN = {
    "by the next step's": [("[step]", "[0]")],
    "behind the loop": [("  commit(); // COMMIT\n", "  commit();\n  fragments[1][2] = 0; // BUG\n")],
    "behind the wait for the group before": [
        ("wait<0>(); // WAIT", "wait<1>();\n  fragments[0][3] = 0; // BUG\n  wait<0>();")
    ],
}


@needs_check
@pytest.mark.parametrize(
    ("changes", "kind", "says", "where"), [each[1:] for each in BROKEN], ids=[each[0] for each in BROKEN]
)
def test_planted_bug_is_reported_where_it_stands(changes: Any, kind: str, says: str, where: str) -> None:
    source = changed(*changes)
    for seed in (0, 1):
        with pytest.raises(KernelFault) as caught:
            PLAIN.run(source, check=True, seed=seed)
        fault = caught.value
        assert fault.kind in kind.split("|"), fault
        assert says in str(fault), fault
        lines = source.splitlines()
        places = [lines[place - 1] for place in (fault.line, fault.other_line) if place]
        assert any(word in place for word in where.split("|") for place in places), fault


@needs_check
@pytest.mark.parametrize("changes", OVERWRITTEN.values(), ids=OVERWRITTEN)
def test_registers_of_a_that_are_written_while_they_are_read_are_reported(changes: Any) -> None:
    for seed in (0, 1):
        with pytest.raises(KernelFault, match="write of a register of A while a wgmma") as caught:
            FRAGMENTS.run(changed(*changes, wgmma=FRAGMENTS), check=True, seed=seed)
        assert caught.value.kind == "race"
        assert "fragments[" in str(caught.value.source_line)


def test_registers_of_a_written_too_early_show_in_the_numbers_when_products_come_late() -> None:
    for changes in OVERWRITTEN.values():
        source = changed(*changes, wgmma=FRAGMENTS)
        got, want = FRAGMENTS.run(source, check=False, seed=0)
        assert np.array_equal(got, want)
        got, _ = FRAGMENTS.run(source, check=False, seed=1)
        assert not np.array_equal(got, want)


@needs_check
def test_who_writes_must_have_heard_of_a_wait() -> None:
    """An atomic update without a fence tells a warp that the others have waited, and orders nothing."""
    source = changed(
        ("wait<0>(); // WAIT", "if (threadIdx.x >= 32) { wait<0>(); atomicAdd(&waited, 1); }\n"
         "  else { while (atomicAdd(&waited, 0) < 96) {} tile[threadIdx.x] = 0; } // BUG\n  wait<0>();"),
        ("  __syncthreads(); // WRITTEN", "  __shared__ int waited;\n  if (threadIdx.x == 0) waited = 0;\n"
                                          "  __syncthreads();"),
    )  # fmt: skip
    for seed in (0, 1):
        with pytest.raises(
            KernelFault, match=r"race: write of byte .*, which a wgmma\.mma_async or tcgen05\.mma has read"
        ) as caught:
            PLAIN.run(source, check=True, seed=seed)
        assert "BUG" in str(caught.value.source_line)


def test_a_missing_wait_shows_in_the_numbers_when_products_come_late() -> None:
    source = changed(
        ("  wait<0>(); // WAIT\n", ""), ("+ i % 2] = d[i]; // READ\n  }", "+ i % 2] = d[i];\n  }\n  wait<0>();")
    )
    got, want = PLAIN.run(source, check=False, seed=0)
    assert np.array_equal(got, want)
    got, _ = PLAIN.run(source, check=False, seed=1)
    assert np.any(np.isnan(got))


def test_a_tile_written_too_early_shows_in_the_numbers_when_products_come_late() -> None:
    write = "__syncthreads();\n  for (int i = threadIdx.x; i < 2048; i += 128) tile[i] = 0;\n  __syncthreads();\n  "
    source = changed(("wait<0>(); // WAIT", f"{write}wait<0>();"))
    got, want = PLAIN.run(source, check=False, seed=0)
    assert np.array_equal(got, want)
    got, _ = PLAIN.run(source, check=False, seed=1)
    assert not np.array_equal(got, want)


@pytest.mark.parametrize("check", BUILDS)
def test_accumulators_may_be_used_again_behind_another_fence(check: bool) -> None:
    again = """for (int i = 0; i < 16; ++i) d[i] -= 1000.0f;
  fence(); // AGAIN
  multiply(d, describe(place, 1, 1024), describe(place + 8192, 1, 1024), 0);
  commit();
  wait<0>();"""
    source = PLAIN.source(again)
    for seed in (0, 1):
        got, _ = PLAIN.run(source, check=check, seed=seed)
        a, b = (each[:, :16].astype(np.float32) for each in PLAIN.matrices())
        assert np.array_equal(got, a @ b.T)
    if check:
        with pytest.raises(KernelFault, match=r"wgmma\.fence must come between"):
            PLAIN.run(source.replace("  fence(); // AGAIN\n", ""), check=True, seed=0)


@pytest.mark.parametrize("name", ["m64n64k16.f16.f16.f16", "m64n64k32.s32.s8.u8", "m64n64k32.f16.e4m3.e4m3"])
def test_other_numbers_are_refused_by_name(name: str) -> None:
    statement = f'asm("wgmma.mma_async.sync.aligned.{name} %0;" : "+f"(*y));'
    source = f'extern "C" __global__ void kernel(float* y) {{\n  {statement}\n}}'
    with pytest.raises(
        EmulatorBuildError, match=rf"no model of the instruction wgmma\.mma_async\.sync\.aligned\.{name}"
    ):
        build(source, "kernel", warp=32, check=False, filename="refused.cu")
