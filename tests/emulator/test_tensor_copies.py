"""Tensor copies in the emulator: boxes with strides, swizzles and edges; and each way to get one wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusegen.emulator import EmulatorBuildError, KernelFault, LaunchError, build
from fusegen.errors import RequestError
from fusegen.language.types import f16, f32, tf32
from fusegen.targets import H200
from fusegen.targets.tensor_map import TensorMap
from tests.programs import MBARRIER, TENSOR_MAP, Array, aligned, compile_all_for, compile_cuda, launch
from tests.tools import BUILDS, needs_check, needs_compiler

TENSOR = (
    TENSOR_MAP
    + MBARRIER
    + """
__device__ __forceinline__ void load_box(void* to, const CUtensorMap& map, int x, int y, mbarrier_t* bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes " // TENSOR
               "[%0], [%1, {%2, %3}], [%4];"
               :: "r"(shared_address(to)), "l"(&map), "r"(x), "r"(y), "r"(shared_address(bar)) : "memory");
}
__device__ __forceinline__ void store_box(const CUtensorMap& map, int x, int y, const void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" // TENSOR
               :: "l"(&map), "r"(x), "r"(y), "r"(shared_address(from)) : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
"""
)


def tensor_map(array: Array, box: tuple[int, ...], swizzle: int = 0, name: str = "map") -> TensorMap:
    dtype = {2: f16, 4: f32}[array.itemsize]
    return TensorMap(name, array.ctypes.data, dtype, array.shape, array.strides[:-1], box, swizzle)


def load(box_bytes: int, x: int, y: int) -> str:
    """Everything that a box holds, as it lies in shared memory."""
    return f"""{TENSOR}
extern "C" __global__ void kernel(const __grid_constant__ CUtensorMap map, const float* a, unsigned char* out) {{
  extern __shared__ __align__(1024) unsigned char tile[];
  __shared__ mbarrier_t bar;
  if (threadIdx.x == 0) {{ init(&bar, 1); publish_init(); }}
  __syncthreads();
  if (threadIdx.x == 0) {{ expect(&bar, {box_bytes}); load_box(tile, map, {x}, {y}, &bar); }} // ISSUE
  wait(&bar, 0); // WAITED
  for (int i = threadIdx.x; i < {box_bytes}; i += 128) out[i] = tile[i]; // READ
}}
"""


def box_of(array: Array, box: tuple[int, int], x: int, y: int) -> Array:
    """With zeros where it juts out."""
    found = np.zeros(box, array.dtype)
    for row, column in itertools.product(range(box[0]), range(box[1])):
        if 0 <= y + row < array.shape[0] and 0 <= x + column < array.shape[1]:
            found[row, column] = array[y + row, x + column]
    return found


def swizzled(box: Array, swizzle: int) -> Array:
    """Its lines, pieces of 16 bytes permuted by the line's number within 128 bytes."""
    if not swizzle:
        return box
    pieces = np.ascontiguousarray(box).view(np.uint8).reshape(-1, swizzle // 16, 16)
    image = np.empty_like(pieces)
    for line, piece in itertools.product(*map(range, pieces.shape[:2])):
        image[line, piece ^ line * swizzle // 128 % (swizzle // 16)] = pieces[line, piece]
    return image


def matrix(rows: int, columns: int, pitch: int, dtype: Any = np.uint16) -> Array:
    """Part of a wider one, all elements different."""
    wide = aligned(np.arange(rows * pitch, dtype=dtype).reshape(rows, pitch))
    return wide[:, :columns]


def run_load(array: Array, given: TensorMap, source: str, *, check: bool, seed: int = 0) -> Array:
    out = aligned(np.full(given.box_bytes, 0xEE, np.uint8))
    memory = array if array.flags.c_contiguous else _whole(array)
    launch(source, [memory, out], check=check, seed=seed, maps=[given], shared_bytes=given.box_bytes)
    return out


def _whole(array: Array) -> Array:
    """The memory from a matrix's first row to its last, gaps and all."""
    rows, pitch = array.shape[0], array.strides[0] // array.itemsize
    return np.lib.stride_tricks.as_strided(array, (rows, pitch), array.strides)


LOADS = [
    *((swizzle, 64, 0, 0) for swizzle in (0, 32, 64, 128)),
    *((swizzle, 64, 40, 90) for swizzle in (0, 32, 64, 128)),  # over the right and the lower edge
    (128, 16, -8, -3), (0, 8, -16, -7), (32, 8, 200, 0), (128, 8, 0, 100),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize(("swizzle", "rows", "x", "y"), LOADS)
def test_a_box_is_loaded(swizzle: int, rows: int, x: int, y: int, check: bool) -> None:
    array = matrix(100, 72, 80)
    box = (rows, (swizzle or 48) // 2)
    given = tensor_map(array, box, swizzle)
    want = swizzled(box_of(array, box, x, y), swizzle).ravel().view(np.uint8)
    source = load(given.box_bytes, x, y)
    for seed in (0, 1):
        assert np.array_equal(run_load(array, given, source, check=check, seed=seed), want)


@needs_compiler
@pytest.mark.parametrize("check", BUILDS)
def test_f32_is_rounded_to_tf32_on_its_way(check: bool) -> None:
    """Ties to even, subnormals kept, infinity beyond the largest: read from an H200, 16384 random f32 among them."""
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, (64, 32), dtype=np.uint32)
    bits[0] = 0x3F800000 + 0x1000 * np.arange(32)  # every other one a tie
    bits[1, :4] = 1, 0x1FFF, 0x7F7FFFFF, 0xFF800000
    array = aligned(np.where((bits & 0x7F800000) == 0x7F800000, 0x3F801000, bits).astype(np.uint32).view(np.float32))
    given = replace(tensor_map(array, (64, 32), 128), dtype=tf32)
    values = array.astype(np.float64)
    digit = np.exp2(np.floor(np.log2(np.maximum(np.abs(values), 2.0**-126))) - 10)
    with np.errstate(over="ignore"):
        rounded = (np.round(values / digit) * digit).astype(np.float32)
    want = swizzled(rounded, 128).ravel().view(np.uint8)
    for seed in (0, 1):
        got = run_load(array, given, load(given.box_bytes, 0, 0), check=check, seed=seed)
        assert np.array_equal(got, want)


@needs_compiler
@pytest.mark.parametrize("check", BUILDS)
def test_a_box_of_three_axes(check: bool) -> None:
    array = aligned(np.arange(5 * 6 * 16, dtype=np.float32).reshape(5, 6, 16))
    given = tensor_map(array, (2, 4, 8))
    source = (
        load(given.box_bytes, 4, 3)
        .replace("tensor.2d.shared", "tensor.3d.shared")
        .replace("{%2, %3}], [%4]", "{%2, %3, 4}], [%4]")
    )
    want = np.zeros((2, 4, 8), np.float32)
    want[:1, :3] = array[4:, 3:, 4:12]
    for seed in (0, 1):
        assert np.array_equal(run_load(array, given, source, check=check, seed=seed).view(np.float32), want.ravel())


FORMS = [
    ("shared::cluster.global.mbarrier::complete_tx::bytes", "", ""),
    ("shared::cta.global.tile.mbarrier::complete_tx::bytes", "", ""),
    ("shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint", "", "policy"),
    ("shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint", "", "policy"),
    ("shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster", "mask", ""),
    ("shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint", "mask", "policy"),
]


@needs_compiler
@pytest.mark.parametrize(("form", "mask", "policy"), FORMS)
def test_forms_of_a_load(form: str, mask: str, policy: str) -> None:
    array = matrix(64, 64, 64)
    given = tensor_map(array, (64, 64), 128)
    more = [each for each in (mask, policy) if each]
    operands = "".join(f", %{5 + place}" for place in range(len(more)))
    values = "".join(", " + {"mask": '"h"((unsigned short)1)', "policy": '"l"(policy)'}[each] for each in more)
    source = load(given.box_bytes, 0, 0)
    source = source.replace("shared::cluster.global.tile.mbarrier::complete_tx::bytes", form)
    source = source.replace("[%1, {%2, %3}], [%4];", f"[%1, {{%2, %3}}], [%4]{operands};")
    source = source.replace('"r"(shared_address(bar)) : "memory");\n}\n__device__ __forceinline__ void store_box',
                            f'"r"(shared_address(bar)){values} : "memory");\n}}\n'
                            "__device__ __forceinline__ void store_box")  # fmt: skip
    if policy:
        make = 'unsigned long long policy;\n  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));\n'
        head = "int x, int y, mbarrier_t* bar) {\n"
        source = source.replace(head, f"{head}  {make}")
    compile_cuda(source, shared_bytes=given.box_bytes)
    assert np.array_equal(run_load(array, given, source, check=False), swizzled(array, 128).ravel().view(np.uint8))


STORE = f"""{TENSOR}
extern "C" __global__ void kernel(const __grid_constant__ CUtensorMap map, const unsigned char* image, float* out) {{
  extern __shared__ __align__(1024) unsigned char tile[];
  for (int i = threadIdx.x; i < BYTES; i += 128) tile[i] = image[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads(); // WRITTEN
  if (threadIdx.x == 0) {{ store_box(map, X, Y, tile); wait_read(); }} // ISSUE
}}
"""


def store(given: TensorMap, x: int, y: int) -> str:
    return STORE.replace("BYTES", str(given.box_bytes)).replace("X, Y", f"{x}, {y}")


@needs_compiler
@pytest.mark.parametrize("check", BUILDS)
@pytest.mark.parametrize(("swizzle", "rows", "x", "y"), LOADS)
def test_a_box_is_stored(swizzle: int, rows: int, x: int, y: int, check: bool) -> None:
    out = matrix(100, 72, 80)
    box = (rows, (swizzle or 48) // 2)
    values = np.random.default_rng(0).integers(1, 2**16, box).astype(np.uint16)
    image = aligned(swizzled(values, swizzle).ravel().view(np.uint8))
    want = out.copy()
    for row, column in itertools.product(range(rows), range(box[1])):
        if 0 <= y + row < 100 and 0 <= x + column < 72:
            want[y + row, x + column] = values[row, column]
    given = tensor_map(out, box, swizzle)
    for seed in (0, 1):
        out[...] = matrix(100, 72, 80)
        launch(
            store(given, x, y), [image, _whole(out)], check=check, seed=seed, maps=[given], shared_bytes=given.box_bytes
        )
        assert np.array_equal(out, want)


@needs_compiler
@pytest.mark.parametrize("check", BUILDS)
def test_a_box_for_every_block_of_a_cluster(check: bool) -> None:
    """Each block brings half of the tile to both; everyone waits for the whole."""
    array = matrix(64, 64, 64)
    given = tensor_map(array, (32, 64), 128)
    source = f"""{TENSOR}
__device__ __forceinline__ void to_all(void* to, const CUtensorMap& map, int y, mbarrier_t* bar) {{
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {{%2, %3}}], [%4], %5;"
               :: "r"(shared_address(to)), "l"(&map), "r"(0), "r"(y), "r"(shared_address(bar)), "h"((unsigned short)3)
               : "memory");
}}
extern "C" __global__ void __cluster_dims__(2, 1, 1)
kernel(const __grid_constant__ CUtensorMap map, const float* a, unsigned char* out) {{
  extern __shared__ __align__(1024) unsigned char tile[];
  __shared__ mbarrier_t bar;
  const unsigned rank = __clusterRelativeBlockRank();
  if (threadIdx.x == 0) {{ init(&bar, 1); publish_init(); expect(&bar, 8192); }}
  __cluster_barrier_arrive(); __cluster_barrier_wait();
  if (threadIdx.x == 0) to_all(tile + 4096 * rank, map, 32 * rank, &bar);
  wait(&bar, 0);
  for (int i = threadIdx.x; i < 8192; i += 128) out[8192 * rank + i] = tile[i];
  __cluster_barrier_arrive(); __cluster_barrier_wait();
}}
"""
    compile_cuda(source, shared_bytes=8192)
    want = swizzled(array, 128).ravel().view(np.uint8)
    for seed in (0, 1, 2):
        out = aligned(np.zeros(16384, np.uint8))
        launch(source, [array, out], check=check, seed=seed, maps=[given], shared_bytes=8192, grid=(2, 1, 1))
        assert np.array_equal(out.reshape(2, 8192), [want, want])


ARRAY = matrix(100, 64, 64)
GIVEN = tensor_map(ARRAY, (64, 64), 128)
LOAD = load(GIVEN.box_bytes, 0, 0)
BROKEN = [
    (
        "fewer bytes than the box has",
        [("expect(&bar, 8192)", "expect(&bar, 8176)")],
        "mbarrier|deadlock",
        "",
        "WAIT|TENSOR",
    ),
    ("more bytes than the box has", [("expect(&bar, 8192)", "expect(&bar, 8208)")], "deadlock", "and 16 bytes", "WAIT"),
    ("no wait", [("wait(&bar, 0); // WAITED", "__syncthreads();")], "race", "", "READ"),
    (
        "shared memory between two lines",
        [("load_box(tile", "load_box(tile + 64")],
        "misaligned",
        "no multiple of 128",
        "TENSOR",
    ),
    (
        "a box that begins between 16 bytes of a line",
        [("map, 0, 0, &bar); } // ISSUE", "map, 4, 0, &bar); } // ISSUE")],
        "misaligned",
        "begins at element 4 of its line, which is no multiple of 16 bytes",
        "TENSOR",
    ),
    (
        "a box that begins there, in front of the line",
        [("map, 0, 0, &bar); } // ISSUE", "map, -1, 0, &bar); } // ISSUE")],
        "misaligned",
        "begins at element -1 of its line",
        "TENSOR",
    ),
    (
        "a box beyond shared memory",
        [("load_box(tile", "load_box(tile + 128")],
        "out-of-bounds",
        "write of 8192 bytes",
        "TENSOR",
    ),
    (
        "a copy of the map",
        [("load_box(tile, map", "CUtensorMap other = {}; load_box(tile, other")],
        "tensor",
        "there is no tensor map",
        "TENSOR",
    ),
    (
        "another rank",
        [("tensor.2d.shared", "tensor.3d.shared"), ("{%2, %3}", "{%2, %3, %3}")],
        "tensor",
        "a copy of 3 axes with a tensor map of 2",
        "TENSOR",
    ),
    (
        "two boxes in one place",
        [
            ("load_box(tile, map, 0, 0, &bar);", 2 * "load_box(tile, map, 0, 0, &bar); "),
            ("8192); load", "16384); load"),
        ],
        "race",
        "write of byte",
        "TENSOR",
    ),
]


def changed(source: str, pairs: Any) -> str:
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    return source


def require_reported(fault: KernelFault, source: str, kind: str, says: str, where: str) -> None:
    assert fault.kind in kind.split("|"), fault
    assert says in str(fault), fault
    lines = source.splitlines()
    places = [lines[place - 1] for place in (fault.line, fault.other_line) if place]
    assert any(word in place for word in where.split("|") for place in places), fault


@needs_check
@pytest.mark.parametrize(
    ("changes", "kind", "says", "where"), [each[1:] for each in BROKEN], ids=[each[0] for each in BROKEN]
)
def test_planted_bug_is_reported_where_it_stands(changes: Any, kind: str, says: str, where: str) -> None:
    source = changed(LOAD, changes)
    for seed in (0, 1):
        with pytest.raises(KernelFault) as caught:
            run_load(ARRAY, GIVEN, source, check=True, seed=seed)
        require_reported(caught.value, source, kind, says, where)


@needs_check
def test_a_tensor_that_is_larger_than_its_buffer() -> None:
    given = replace(GIVEN, shape=(101, 64))
    with pytest.raises(KernelFault, match="out-of-bounds: read of 128 bytes at byte 12800 of a"):
        run_load(ARRAY, given, load(given.box_bytes, 0, 60), check=True)


STORE_BUGS = [
    (
        "a box that begins between 16 bytes of a line",
        [("store_box(map, 0, 0", "store_box(map, 7, 0")],
        "misaligned",
        "begins at element 7 of its line",
        "TENSOR",
    ),
    (
        "no fence between the proxies",
        [("fence.proxy.async.shared::cta;", "")],
        "race",
        "fence.proxy.async must come between",
        "TENSOR",
    ),
    ("no barrier", [("  __syncthreads(); // WRITTEN\n", "")], "race", "is not ordered with the", "TENSOR"),
    (
        "the thread ends in front of it",
        [(" wait_read();", "")],
        "race",
        "the thread ends while this bulk copy",
        "TENSOR",
    ),
    (
        "the tile is written meanwhile",
        [("wait_read(); }", "tile[5] = 0; wait_read(); }")],
        "race",
        "while a bulk copy that has not been waited for may still be reading it",
        "ISSUE",
    ),
    (
        "what is stored is read at once",
        [("wait_read(); }", "wait_read(); if (out[0] == 1) out[1] = 0; }")],
        "race",
        "while the copy into it is under way",
        "ISSUE",
    ),
]


@needs_check
@pytest.mark.parametrize(
    ("changes", "kind", "says", "where"), [each[1:] for each in STORE_BUGS], ids=[each[0] for each in STORE_BUGS]
)
def test_planted_bug_of_a_store(changes: Any, kind: str, says: str, where: str) -> None:
    out = aligned(np.zeros((64, 64), np.uint16))
    given = tensor_map(out, (64, 64), 128)
    source = changed(store(given, 0, 0), changes)
    for seed in (0, 1):
        with pytest.raises(KernelFault) as caught:
            launch(
                source, [aligned(np.zeros(8192, np.uint8)), out], check=True, seed=seed, maps=[given], shared_bytes=8192
            )
        require_reported(caught.value, source, kind, says, where)


def test_the_programs_are_cuda() -> None:
    compile_all_for(H200, [LOAD, store(GIVEN, 0, 0), *(changed(LOAD, each[1]) for each in BROKEN)])


# --- the host's side


@needs_compiler
def test_an_argument_of_another_size_is_refused() -> None:
    kernel = build(LOAD, "kernel", warp=32, check=False, filename="load.cu")
    with pytest.raises(LaunchError, match="argument 1 has 8 bytes, and map has 128"):
        kernel.launch((1, 1, 1), (128, 1, 1), 0, [GIVEN, GIVEN, GIVEN])


def test_a_map_that_the_launch_has_not_placed_is_refused() -> None:
    for old, new in (
        ("const __grid_constant__ CUtensorMap map", "const CUtensorMap map"),
        ("const CUtensorMap& map, int x, int y, m", "CUtensorMap map, int x, int y, m"),
    ):
        with pytest.raises(EmulatorBuildError, match="it wants `const __grid_constant__ CUtensorMap name`"):
            build(LOAD.replace(old, new), "kernel", warp=32, check=False, filename="load.cu")


GOOD: dict[str, Any] = {
    "name": "x",
    "base": 4096,
    "dtype": f16,
    "shape": (128, 64),
    "strides": (256,),
    "box": (64, 64),
    "swizzle": 128,
}


def test_a_map_in_the_order_of_the_driver() -> None:
    made = TensorMap(**{**GOOD, "shape": (4, 128, 64), "strides": (65536, 256), "box": (1, 32, 64)})
    assert made.driver_arguments() == (3, (64, 128, 4), (256, 65536), (64, 32, 1), (1, 1, 1))
    assert (made.box_bytes, made.line_bytes) == (4096, 128)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shape": (), "strides": (), "box": ()}, "the tensor map x has 0 axes; a tensor copy needs 1 to 5"),
        ({"strides": ()}, "has 0 strides for 2 axes"),
        ({"box": (64,)}, "has a box of 1 axes and a tensor of 2"),
        ({"base": 4104}, "lies at address 0x1008; a tensor copy needs a multiple of 16"),
        ({"base": 0}, "lies at address 0x0"),
        ({"shape": (0, 64)}, "has an axis of 0 elements"),
        ({"shape": (2**32 + 1, 64)}, "has an axis of 4294967297 elements"),
        ({"strides": (250,)}, "has a stride of 250 bytes; a tensor copy needs a multiple of 16 below 2^40"),
        ({"strides": (1 << 40,)}, "has a stride of"),
        ({"box": (257, 64)}, "has a box of 257 elements along an axis; a tensor copy needs 1 to 256"),
        ({"box": (0, 64)}, "has a box of 0 elements"),
        ({"box": (64, 63), "swizzle": 0}, "whose lines are 126 bytes; a tensor copy needs a multiple of 16"),
        ({"swizzle": 256}, "has a swizzle of 256 bytes; a tensor copy needs 0, 32, 64, 128"),
        ({"box": (64, 128)}, "whose lines are 256 bytes, and a swizzle of 128; a tensor copy needs lines as long"),
    ],
)
def test_what_the_driver_would_refuse(change: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        TensorMap(**{**GOOD, **change})
    assert says in str(caught.value)
