"""Tensor memory in the emulator: layouts and types of tcgen05.mma, and each way to use it wrongly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fusegen.emulator import KernelFault
from fusegen.targets import B200
from tests.emulator.test_wgmma import NUMBERS, shared_image
from tests.programs import Array, aligned, compile_all_for, launch
from tests.tools import BUILDS, needs_check, needs_compiler

pytestmark = needs_compiler

KINDS = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4", "s8": "i8", "u8": "i8"}
FORMATS = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "s8": 1, "u8": 0}
SWIZZLES = {0: 0, 128: 2, 64: 4, 32: 6}  # bytes: the field of a descriptor


@dataclass(frozen=True)
class Product:
    """Two tiles of 128 x n one after the other: the first one's sums are read while the second one is multiplied."""

    number: str
    n: int
    swizzle: int = 128
    across_a: bool = False
    across_b: bool = False
    other: str = ""  # what B is of, where it is another type

    def __str__(self) -> str:
        lie = "".join(" across" if across else " along" for across in (self.across_a, self.across_b))
        return f"{self.number} n{self.n} {self.swizzle}{lie}"

    @property
    def k(self) -> int:
        """Of one instruction."""
        return 32 // int(NUMBERS[self.number].itemsize)

    @property
    def whole(self) -> bool:
        return KINDS[self.number] == "i8"

    @property
    def depth(self) -> int:
        own = self.swizzle and not (self.across_a and self.across_b)
        return self.swizzle * self.k // 32 if own else 2 * self.k

    @property
    def columns(self) -> int:
        """Of tensor memory: two accumulators' next power of 2."""
        return max(32, 1 << (2 * self.n - 1).bit_length())

    @property
    def instruction(self) -> int:
        """The 32 bits of PTX ISA's instruction descriptor."""
        formats = FORMATS[self.number] << 7 | FORMATS[self.other or self.number] << 10
        return (
            (2 if self.whole else 1) << 4
            | formats
            | self.across_a << 15
            | self.across_b << 16
            | self.n >> 3 << 17
            | 8 << 24
        )

    def matrices(self) -> tuple[Array, Array]:
        rng = np.random.default_rng(self.n)
        least, most = (0, 256) if self.number == "u8" else (-128, 128) if self.whole else (-8, 9)
        return (
            rng.integers(least, most, (128, self.depth)).astype(NUMBERS[self.number]),
            rng.integers(least, most, (self.n, self.depth)).astype(NUMBERS[self.other or self.number]),
        )

    def advance(self, across: bool, lines: int, stride: int) -> int:
        """Bytes from one step along K to the next."""
        if across:
            return 2 * stride if self.swizzle else 2 * 8 * 16
        return 32 if self.swizzle else 2 * lines * 16

    def source(self) -> str:
        a, b = self.matrices()
        image_a, leading_a, stride_a = shared_image(a, self.swizzle, self.across_a)
        image_b, leading_b, stride_b = shared_image(b, self.swizzle, self.across_b)
        total = image_a.nbytes + image_b.nbytes
        repeats = self.n // 8 & -(self.n // 8)  # a load takes so many times 8 columns, a power of 2
        sums = ", ".join(f"%{i}" for i in range(4 * repeats))
        outputs = ", ".join(f'"={"r" if self.whole else "f"}"(d[{i}])' for i in range(4 * repeats))
        kind = "int" if self.whole else "float"
        advance_a, advance_b = self.advance(self.across_a, 128, stride_a), self.advance(self.across_b, self.n, stride_b)
        return f"""
__device__ __forceinline__ unsigned long long describe(unsigned place, int leading, int stride) {{
  return (place & 0x3ffff) >> 4 | static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(stride >> 4) << 32 | 1ull << 46 | {SWIZZLES[self.swizzle]}ull << 61;
}}
__device__ __forceinline__ void multiply(unsigned to, unsigned long long a, unsigned long long b, int adds) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %4, 0;\\n" // MMA
               "tcgen05.mma.cta_group::1.kind::{KINDS[self.number]} [%0], %1, %2, %3, p;\\n}}"
               :: "r"(to), "l"(a), "l"(b), "r"({self.instruction}u), "r"(adds) : "memory");
}}
__device__ __forceinline__ void commit(unsigned barrier) {{
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
               :: "r"(barrier) : "memory");
}}
__device__ __forceinline__ void before() {{ asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }}
__device__ __forceinline__ void after() {{ asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }}
__device__ __forceinline__ void wait_loads() {{ asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }}
__device__ __forceinline__ void arrive(unsigned barrier) {{
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}}
__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {{
  asm volatile("{{\\n.reg .pred p;\\nagain:\\n"
               "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n@!p bra again;\\n}}"
               :: "r"(barrier), "r"(parity) : "memory");
}}

extern "C" __global__ void __launch_bounds__(192) kernel(const uint4* image, {kind}* out) {{
  extern __shared__ __align__(1024) unsigned char tile[];
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  const unsigned summed = place + {total}, taken = summed + 8;
  uint4* const pieces = reinterpret_cast<uint4*>(tile);
  for (int i = threadIdx.x; i < {total // 16}; i += 192) pieces[i] = image[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // PROXY
  if (threadIdx.x == 0) {{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(summed) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 4;" :: "r"(taken) : "memory");
  }}
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 5) {{
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" // ALLOC
                 :: "r"(taken + 8), "r"({self.columns}) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
  }}
  __syncthreads();
  const unsigned sums = *reinterpret_cast<unsigned*>(tile + {total} + 16);
  if (threadIdx.x == 128) {{
    for (int turn = 0; turn < 3; ++turn) {{
      if (turn == 2) {{
        wait(taken, 0); // TAKEN
        after(); // REUSED
      }}
      for (int step = 0; step < {self.depth // self.k}; ++step) {{
        multiply(sums + turn % 2 * {self.n}, describe(place + step * {advance_a}, {leading_a}, {stride_a}),
                 describe(place + {image_a.nbytes} + step * {advance_b}, {leading_b}, {stride_b}), step);
      }}
      commit(summed); // COMMIT
      if (turn < 2) wait(summed, turn % 2); // TURN
    }}
  }} else if (warp < 4) {{
    for (int turn = 0; turn < 3; ++turn) {{
      wait(summed, turn % 2); // SUMMED
      after(); // SEEN
      for (int half = 0; half < 2; ++half) {{
        for (int first = 0; first < {self.n}; first += {8 * repeats}) {{
          {kind} d[{4 * repeats}];
          asm volatile("tcgen05.ld.sync.aligned.16x256b.x{repeats}.b32 {{{sums}}}, [%{4 * repeats}];" // LOAD
                       : {outputs} : "r"(sums + turn % 2 * {self.n} + first + (warp * 32 + half * 16 << 16)));
          wait_loads(); // LOADED
          for (int i = 0; i < {4 * repeats}; ++i) {{
            const int row = warp * 32 + half * 16 + lane / 4 + i / 2 % 2 * 8;
            out[(turn * 128 + row) * {self.n} + first + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
          }}
        }}
      }}
      before(); // READ
      if (turn == 0) {{
        __syncwarp();
        if (lane == 0) arrive(taken); // GIVEN
      }}
    }}
  }}
  __syncthreads(); // END
  after();
  if (warp == 5) {{
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" :: "r"(sums), "r"({self.columns}) : "memory");
  }}
}}
"""

    def run(self, source: str, *, check: bool, seed: int) -> tuple[Array, Array]:
        a, b = self.matrices()
        images = [shared_image(each, self.swizzle, across)[0].view(np.uint8) for each, across in
                  ((a, self.across_a), (b, self.across_b))]  # fmt: skip
        image = aligned(np.concatenate(images))
        kind = np.int32 if self.whole else np.float32
        out = aligned(np.zeros((3, 128, self.n), kind))
        launch(source, [image, out], check=check, seed=seed, shared_bytes=image.nbytes + 32, threads=192)
        exact = a.astype(np.float64) @ b.astype(np.float64).T
        return out, np.broadcast_to(exact.astype(kind), out.shape)


LAYOUTS = [
    *(Product("bf16", 64, swizzle) for swizzle in SWIZZLES),
    *(Product("f16", 64, swizzle, across_b=True) for swizzle in SWIZZLES),
    *(Product("f16", 64, swizzle, across_a=True) for swizzle in SWIZZLES),
    *(Product("bf16", 128, swizzle, across_a=True, across_b=True) for swizzle in SWIZZLES),
    *(Product("f16", n) for n in (16, 48, 256)),
    *(Product("tf32", 64, swizzle) for swizzle in SWIZZLES),
    *(Product("e4m3", 64, swizzle, other="e5m2") for swizzle in SWIZZLES),
    Product("e5m2", 32),
    Product("s8", 64),
    Product("u8", 32),
]


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("product", LAYOUTS, ids=str)
def test_every_layout(product: Product, check: bool) -> None:
    for seed in (0, 1):
        got, want = product.run(product.source(), check=check, seed=seed)
        assert np.array_equal(got, want), seed


def test_the_layouts_are_cuda() -> None:
    compile_all_for(B200, [product.source() for product in LAYOUTS])


PLAIN = Product("bf16", 32)


def changed(*pairs: tuple[str, str]) -> str:
    source = PLAIN.source()
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize("check", BUILDS)
def test_another_swizzle_gives_other_numbers(check: bool) -> None:
    for other in (4, 6):
        got, want = PLAIN.run(changed(("2ull << 61", f"{other}ull << 61")), check=check, seed=0)
        assert not np.array_equal(got, want)


BROKEN: list[tuple[str, list[tuple[str, str]], str, str, str]] = [
    (
        "no fence between the proxies",
        [("fence.proxy.async.shared::cta;", "")],
        "race",
        "written by a plain store: fence.proxy.async must come between",
        "MMA",
    ),
    (
        "no commit",
        [("commit(summed); // COMMIT", ";"), ("if (turn < 2) wait(summed, turn % 2);", "")],
        "deadlock",
        "lacks 1 of 1 arrivals",
        "again",
    ),
    (
        "sums are read before they are waited for",
        [("wait(summed, turn % 2); // SUMMED", "")],
        "uninitialised|race",
        "column",
        "LOAD",
    ),
    (
        "no fence behind the wait for sums",
        [("after(); // SEEN", "")],
        "race",
        "tcgen05.fence::after_thread_sync must come behind the wait",
        "LOAD",
    ),
    ("no wait for a load", [("wait_loads(); // LOADED", "")], "race", "tcgen05.wait::ld must come first", "LOAD"),
    (
        "no fence behind the loads",
        [("before(); // READ", "")],
        "race",
        "tcgen05.fence::before_thread_sync must come behind its tcgen05.wait::ld",
        "MMA",
    ),
    (
        "columns are written anew before they have been read",
        [("wait(taken, 0); // TAKEN", "")],
        "race",
        "column",
        "MMA|LOAD",
    ),
    (
        "no fence before columns are written anew",
        [("after(); // REUSED", "")],
        "race",
        "tcgen05.fence::after_thread_sync must come behind the wait",
        "MMA",
    ),
    (
        "one warp tells for four",
        [
            ('"mbarrier.init.shared::cta.b64 [%0], 4;"', '"mbarrier.init.shared::cta.b64 [%0], 1;"'),
            ("if (lane == 0) arrive(taken);", "if (lane == 0 && warp == 0) arrive(taken);"),
        ],
        "race",
        "column",
        "MMA",
    ),
    (
        "another warp's lanes",
        [("(warp * 32 + half", "((warp ^ 1) * 32 + half")],
        "out-of-bounds",
        "which reaches lanes",
        "LOAD",
    ),
    (
        "columns of nobody",
        [("half * 16 << 16)", "half * 16 << 16) + 64")],
        "out-of-bounds",
        "which is not allocated",
        "LOAD",
    ),
    (
        "a product beyond the allocation",
        [("multiply(sums + ", "multiply(sums + 48 + ")],
        "out-of-bounds",
        "which is not allocated",
        "MMA",
    ),
    ("sums that nothing began", [(", step);", ", 1);")], "uninitialised", "adds to column", "MMA"),
    (
        "no deallocation",
        [
            (
                'if (warp == 5) {\n    asm volatile("tcgen05.dealloc',
                'if (warp == 7) {\n    asm volatile("tcgen05.dealloc',
            )
        ],
        "tensor",
        "the block ends with 64 columns of tensor memory allocated",
        "END|dealloc|}",
    ),
    ("48 columns", [('"r"(64)', '"r"(48)')], "tensor", "32, 64, 128, 256 and 512 are possible", "ALLOC"),
    (
        "half a warp allocates",
        [
            (
                'if (warp == 5) {\n    asm volatile("tcgen05.alloc',
                'if (threadIdx.x >= 176) {\n    asm volatile("tcgen05.alloc',
            )
        ],
        "deadlock|divergent-warp",
        "warp",
        "ALLOC",
    ),
    ("Hopper's descriptor", [("| 1ull << 46 |", "|")], "tensor", "bits 46 to 48 must be 0b001", "MMA"),
    ("Hopper's swizzle", [("2ull << 61", "1ull << 62 | 1ull << 61")], "tensor", "swizzle mode 3", "MMA"),
    (
        "a factor is written over before the commit",
        [("commit(summed); // COMMIT", "tile[0] = 0; // BUG\n      commit(summed);")],
        "race",
        "while a tcgen05.mma that nobody has waited for may still be reading it",
        "BUG",
    ),
    (
        "deallocated while another reads",
        [("__syncthreads(); // END\n  after();", "")],
        "race|out-of-bounds",
        "column",
        "dealloc|LOAD|MMA",
    ),
]


@needs_check
@pytest.mark.parametrize(
    ("changes", "kind", "says", "where"), [each[1:] for each in BROKEN], ids=[each[0] for each in BROKEN]
)
def test_planted_bug_is_reported_where_it_stands(
    changes: list[tuple[str, str]], kind: str, says: str, where: str
) -> None:
    source = changed(*changes)
    for seed in (0, 1):
        with pytest.raises(KernelFault) as caught:
            PLAIN.run(source, check=True, seed=seed)
        fault = caught.value
        assert fault.kind in kind.split("|"), fault
        assert says in str(fault), fault
        lines = source.splitlines()
        places = [lines[place - 1] for place in (fault.line, fault.other_line) if place]
        assert not places or any(word in place for word in where.split("|") for place in places), fault


def test_sums_read_too_early_show_in_the_numbers_when_products_come_late() -> None:
    """Without the checking build's clocks: registers are NaN until the load is waited for."""
    source = changed(("wait_loads(); // LOADED", ""), ("before(); // READ", "wait_loads();\n      before();"))
    got, _ = PLAIN.run(source, check=False, seed=1)
    assert np.any(np.isnan(got))
