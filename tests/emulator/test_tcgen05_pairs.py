"""Pairs of blocks in the emulator (tcgen05 with cta_group::2): layouts, and each way to use one wrongly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fusegen.emulator import KernelFault
from fusegen.targets import B200
from tests.emulator.test_tcgen05 import KINDS, SWIZZLES, Product
from tests.emulator.test_wgmma import shared_image
from tests.programs import Array, aligned, compile_all_for, launch
from tests.tools import BUILDS, needs_check, needs_compiler

pytestmark = needs_compiler


@dataclass(frozen=True)
class Pair(Product):
    """256 x n sums, of which each block has 128 rows, twice into the same columns: B's halves lie in the two blocks."""

    @property
    def instruction(self) -> int:
        return super().instruction & ~(31 << 24) | 16 << 24

    def matrices(self) -> tuple[Array, Array]:
        rng = np.random.default_rng(self.n)
        upper, b = super().matrices()
        least, most = (0, 256) if self.number == "u8" else (-8, 9)
        return np.concatenate([upper, rng.integers(least, most, upper.shape).astype(upper.dtype)]), b

    def images(self, block: int) -> list[Array]:
        """A's and B's half in the shared memory of a block."""
        a, b = self.matrices()
        halves = (a[block * 128 :][:128], self.across_a), (b[block * self.n // 2 :][: self.n // 2], self.across_b)
        return [shared_image(each, self.swizzle, across)[0].view(np.uint8) for each, across in halves]

    def source(self) -> str:
        a, b = self.matrices()
        image_a, leading_a, stride_a = shared_image(a[:128], self.swizzle, self.across_a)
        image_b, leading_b, stride_b = shared_image(b[: self.n // 2], self.swizzle, self.across_b)
        total = image_a.nbytes + image_b.nbytes
        columns = max(32, 1 << (self.n - 1).bit_length())
        repeats = self.n // 8 & -(self.n // 8)
        sums = ", ".join(f"%{i}" for i in range(4 * repeats))
        outputs = ", ".join(f'"={"r" if self.whole else "f"}"(d[{i}])' for i in range(4 * repeats))
        kind = "int" if self.whole else "float"
        advance_a = self.advance(self.across_a, 128, stride_a)
        advance_b = self.advance(self.across_b, self.n // 2, stride_b)
        return f"""
__device__ __forceinline__ unsigned long long describe(unsigned place, int leading, int stride) {{
  return (place & 0x3ffff) >> 4 | static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(stride >> 4) << 32 | 1ull << 46 | {SWIZZLES[self.swizzle]}ull << 61;
}}
__device__ __forceinline__ void multiply(unsigned to, unsigned long long a, unsigned long long b, int adds) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %4, 0;\\n" // MMA
               "tcgen05.mma.cta_group::2.kind::{KINDS[self.number]} [%0], %1, %2, %3, p;\\n}}"
               :: "r"(to), "l"(a), "l"(b), "r"({self.instruction}u), "r"(adds) : "memory");
}}
__device__ __forceinline__ void commit(unsigned barrier) {{
  asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;"
               :: "r"(barrier), "h"(static_cast<unsigned short>(3)) : "memory");
}}
__device__ __forceinline__ void before() {{ asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }}
__device__ __forceinline__ void after() {{ asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }}
__device__ __forceinline__ void meet() {{
  __cluster_barrier_arrive();
  __cluster_barrier_wait(); // MEET
}}
__device__ __forceinline__ void arrive_in_first(unsigned barrier) {{
  asm volatile("{{\\n.reg .b32 there;\\nmapa.shared::cluster.u32 there, %0, 0;\\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\\n}}"
               :: "r"(barrier) : "memory"); // SENT
}}
__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {{
  asm volatile("{{\\n.reg .pred p;\\nagain:\\n"
               "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n@!p bra again;\\n}}"
               :: "r"(barrier), "r"(parity) : "memory");
}}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(192) kernel(const uint4* images, {kind}* out) {{
  extern __shared__ __align__(1024) unsigned char tile[];
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(tile));
  const unsigned summed = place + {total}, taken = summed + 8;
  const int rank = __clusterRelativeBlockRank();
  uint4* const pieces = reinterpret_cast<uint4*>(tile);
  const uint4* const image = images + rank * {total // 16};
  for (int i = threadIdx.x; i < {total // 16}; i += 192) pieces[i] = image[i]; // FILL
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // PROXY
  if (threadIdx.x == 0) {{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(summed) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 8;" :: "r"(taken) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }}
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 5) {{ // ALLOCATES
    asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" // ALLOC
                 :: "r"(taken + 8), "r"({columns}) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
  }}
  meet(); // BEGIN
  const unsigned sums = *reinterpret_cast<unsigned*>(tile + {total} + 16);
  if (rank == 0 && threadIdx.x == 128) {{
    for (int turn = 0; turn < 2; ++turn) {{
      if (turn == 1) {{
        wait(taken, 0); // TAKEN
        after(); // REUSED
      }}
      for (int step = 0; step < {self.depth // self.k}; ++step) {{
        multiply(sums, describe(place + step * {advance_a}, {leading_a}, {stride_a}),
                 describe(place + {image_a.nbytes} + step * {advance_b}, {leading_b}, {stride_b}), step);
      }}
      commit(summed); // COMMIT
    }}
  }} else if (warp < 4) {{
    for (int turn = 0; turn < 2; ++turn) {{
      wait(summed, turn); // SUMMED
      after(); // SEEN
      for (int half = 0; half < 2; ++half) {{
        for (int first = 0; first < {self.n}; first += {8 * repeats}) {{
          {kind} d[{4 * repeats}];
          asm volatile("tcgen05.ld.sync.aligned.16x256b.x{repeats}.b32 {{{sums}}}, [%{4 * repeats}];" // LOAD
                       : {outputs} : "r"(sums + first + (warp * 32 + half * 16 << 16)));
          asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
          for (int i = 0; i < {4 * repeats}; ++i) {{
            const int row = rank * 128 + warp * 32 + half * 16 + lane / 4 + i / 2 % 2 * 8;
            out[(turn * 256 + row) * {self.n} + first + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
          }}
        }}
      }}
      before(); // READ
      if (turn == 0) {{
        __syncwarp();
        if (lane == 0) arrive_in_first(taken); // GIVEN
      }}
    }}
  }}
  __syncwarp();
  meet(); // END
  after();
  if (warp == 5) {{ // GIVES BACK
    asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" :: "r"(sums), "r"({columns}) : "memory");
  }}
}}
"""

    def run(self, source: str, *, check: bool, seed: int) -> tuple[Array, Array]:
        a, b = self.matrices()
        image = aligned(np.concatenate([*self.images(0), *self.images(1)]))
        kind = np.int32 if self.whole else np.float32
        out = aligned(np.zeros((2, 256, self.n), kind))
        shared = image.nbytes // 2 + 32
        launch(source, [image, out], check=check, seed=seed, shared_bytes=shared, threads=192, grid=(2, 1, 1))
        exact = a.astype(np.float64) @ b.astype(np.float64).T
        return out, np.broadcast_to(exact.astype(kind), out.shape)


LAYOUTS = [
    *(Pair("bf16", 64, swizzle) for swizzle in SWIZZLES),
    *(Pair("f16", 128, swizzle, across_b=True) for swizzle in SWIZZLES),
    *(Pair("f16", 64, swizzle, across_a=True) for swizzle in SWIZZLES),
    *(Pair("f16", n) for n in (32, 96, 256)),
    Pair("tf32", 64),
    Pair("e4m3", 64, other="e5m2"),
    Pair("s8", 64),
    Pair("u8", 32),
]


@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize("product", LAYOUTS, ids=str)
def test_every_layout(product: Pair, check: bool) -> None:
    for seed in (0, 1):
        got, want = product.run(product.source(), check=check, seed=seed)
        assert np.array_equal(got, want), seed


def test_the_layouts_are_cuda() -> None:
    compile_all_for(B200, [product.source() for product in LAYOUTS])


PLAIN = Pair("bf16", 32)


def changed(*pairs: tuple[str, str]) -> str:
    source = PLAIN.source()
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    return source


def test_the_halves_of_the_right_factor_have_an_order() -> None:
    """The first block's columns come first, whichever block's rows they are multiplied by."""
    swapped = changed(("images + rank *", "images + (rank ^ 1) *"))
    got, want = PLAIN.run(swapped, check=False, seed=0)
    assert np.array_equal(got, np.roll(np.roll(want, 128, axis=1), PLAIN.n // 2, axis=2))


BROKEN: list[tuple[str, list[tuple[str, str]], str, str]] = [
    (
        "a commit that tells one block",
        [(".multicast::cluster.b64 [%0], %1;", ".b64 [%0];"), (', "h"(static_cast<unsigned short>(3))', "")],
        "deadlock",
        "no thread can run",
    ),
    (
        "a commit that tells the other block alone",
        [("short>(3)", "short>(2)")],
        "deadlock",
        "no thread can run",
    ),
    (
        "one block allocates",
        [("if (warp == 5) { // ALLOC", "if (warp == 5 && rank == 0) { // ALLOC")],
        "deadlock",
        "to which no warp of the other block of its pair comes",
    ),
    (
        "one block gives back",
        [("if (warp == 5) { // GIVES", "if (warp == 5 && rank == 1) { // GIVES")],
        "tensor|deadlock",
        "tensor memory allocated|to which no warp of the other block",
    ),
    (
        "other columns in the other block",
        [
            (
                '"r"(32) : "memory");\n    asm volatile("tcgen05.rel',
                '"r"(32 << rank) : "memory");\n    asm volatile("tcgen05.rel',
            )
        ],
        "tensor",
        "where the other block of the pair allocates",
    ),
    (
        "a product of one block",
        [("tcgen05.mma.cta_group::2", "tcgen05.mma.cta_group::1")],
        "tensor",
        "a kernel has one",
    ),
    (
        "a commit for one block",
        [("tcgen05.commit.cta_group::2", "tcgen05.commit.cta_group::1")],
        "tensor",
        "a kernel has one",
    ),
    (
        "both blocks multiply",
        [("if (rank == 0 && threadIdx.x == 128)", "if (threadIdx.x == 128)")],
        "tensor|deadlock|race",
        "tcgen05.mma",
    ),
    (
        "the second block multiplies",
        [("if (rank == 0 && threadIdx", "if (rank == 1 && threadIdx")],
        "tensor",
        "whose first block multiplies",
    ),
    (
        "128 rows",
        [(f'"r"({PLAIN.instruction}u)', f'"r"({PLAIN.instruction - (8 << 24)}u)')],
        "tensor",
        "256 rows, and 32 to 256 columns by 32",
    ),
    (
        "48 columns",
        [(f'"r"({PLAIN.instruction}u)', f'"r"({PLAIN.instruction + (2 << 17)}u)')],
        "tensor",
        "asks for 256 x 48",
    ),
    ("no cluster", [("__cluster_dims__(2, 1, 1) ", "")], "tensor", "no other block for this one"),
    (
        "the other block's factors are not waited for",
        [("  meet(); // BEGIN", "  __syncthreads();")],
        "race|uninitialised|mbarrier|out-of-bounds",
        "",
    ),
    (
        "no fence between the proxies in the other block",
        [("fence.proxy.async.shared::cta;", "")],
        "race",
        "fence.proxy.async must come between",
    ),
    (
        "columns are written anew before both blocks have read them",
        [("wait(taken, 0); // TAKEN", "")],
        "race",
        "column",
    ),
    (
        "one block tells for both",
        [
            ('"mbarrier.init.shared::cta.b64 [%0], 8;"', '"mbarrier.init.shared::cta.b64 [%0], 4;"'),
            ("if (lane == 0) arrive_in_first", "if (lane == 0 && rank == 0) arrive_in_first"),
        ],
        "race",
        "column",
    ),
    (
        "each block tells itself",
        [
            ("there, %0, 0;", "there, %0, %1;"),
            (':: "r"(barrier) : "memory"); // SENT', ':: "r"(barrier), "r"(__clusterRelativeBlockRank()) : "memory");'),
        ],
        "deadlock",
        "no thread can run",
    ),
    ("no fence behind the loads", [("before(); // READ", "")], "race", "tcgen05.fence::before_thread_sync"),
    (
        "no fence before columns are written anew",
        [("after(); // REUSED", "")],
        "race",
        "tcgen05.fence::after_thread_sync",
    ),
    ("no fence behind the wait for sums", [("after(); // SEEN", "")], "race", "tcgen05.fence::after_thread_sync"),
    (
        "a block ends before the other one is done",
        [("  meet(); // END", "  __syncthreads();")],
        "race|mbarrier|out-of-bounds|uninitialised",
        "",
    ),
    (
        "a factor is written over before the commit",
        [("commit(summed); // COMMIT", "tile[0] = 0;\n      commit(summed);")],
        "race",
        "may still be reading it",
    ),
]


@needs_check
@pytest.mark.parametrize(("changes", "kind", "says"), [each[1:] for each in BROKEN], ids=[each[0] for each in BROKEN])
def test_planted_bug_is_reported(changes: list[tuple[str, str]], kind: str, says: str) -> None:
    source = changed(*changes)
    for seed in (0, 1):
        with pytest.raises(KernelFault) as caught:
            PLAIN.run(source, check=True, seed=seed)
        fault = caught.value
        assert fault.kind in kind.split("|"), fault
        assert any(text in str(fault) for text in says.split("|")), fault


@needs_check
def test_a_commit_that_arrives_at_a_block_which_may_have_ended_is_reported() -> None:
    """One more that nobody there waits for; the same source is right where the block waits for all of them."""
    more = ("commit(summed); // COMMIT\n    }", "commit(summed); // COMMIT\n    }\n    commit(summed);")
    waits = ("  __syncwarp();\n  meet(); // END", "  wait(summed, 0);\n  __syncwarp();\n  meet(); // END")
    for seed in (0, 1):
        got, want = PLAIN.run(changed(more, waits), check=True, seed=seed)
        assert np.array_equal(got, want), seed
    with pytest.raises(KernelFault, match=r"tcgen05\.commit"):
        PLAIN.run(changed(more), check=True, seed=1)
