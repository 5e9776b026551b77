"""Every shipped spec on a GPU at real sizes, in f16, bf16 and f32, on torch tensors.

Each kernel is compiled as a user would (which validates it), then run on arrays of real size. Of those, a sample of
rows is held to the error bound element by element, and all of them to the same reference text run in float64 on the
GPU: by relative L2, and element by element against storage rounding plus a multiple of the sample's largest bound.
The kernel must repeat itself bit for bit, and rows alone must give what they gave among all others.

Figures are printed at the end, and written as JSON to the folder that FUSEGEN_REPORT_DIR names.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen.language.graph import Graph, Tensor
from fusegen.language.reference import draws, reference
from fusegen.language.spec import Chain
from fusegen.language.types import DTYPES, Dim, DType, b8, bf16, f32, size_of
from fusegen.runtime import Kernel
from fusegen.runtime.finding import present, target_of
from fusegen.targets import Target
from fusegen.validation import Report, analyse, validate
from fusegen.validation.accumulation import accumulations
from fusegen.validation.compare import figures
from fusegen.validation.inputs import Operands
from fusegen.validation.judging import judge
from tests.sizes import sizes_at
from tests.specs import ROWS
from tests.torch_reference import torch, torch_reference

pytestmark = pytest.mark.gpu

# random numbers count all elements before theirs, so no row gives alone what it gave among others; validation has them
SPECS = {name: chain for name, chain in ROWS.items() if not draws(chain.graph)}
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element
SAMPLE = 2**18  # elements held to the bound one by one
FLAT_SAMPLE = 2**31 + 1021
PLACE = "cuda"
MARGIN = 4  # of the sample's largest bound, for rows outside of the sample: they are made alike

# rows x cols, and for chains with more leading axes the sizes of all but the last two
SIZES: Mapping[str, tuple[int, int, tuple[int, ...]]] = {
    "16384x4096": (16384, 4096, (1, 16)),
    "32x2048x2048": (65536, 2048, (1, 32)),
    "N=1": (262144, 1, (8, 16)),
    "N=31": (100_001, 31, (1, 1)),
    "N=4097": (8191, 4097, (3, 5)),
    "N=50257": (1024, 50257, (4, 8)),
    "N=1048576": (128, 1048576, (4, 16)),
}


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    chain: str
    dtype: str
    size: str
    regime: str
    relative_l2: float  # of all elements, against float64
    share: float  # the largest error over what was allowed, in the sample
    sampled: int
    run_us: float  # one warm launch, for orientation; the benchmarks measure properly
    compile_s: float  # with the validation that every first build gets


FIGURES: list[Figure] = []


@pytest.fixture(scope="module")
def target() -> Target:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    for gpu in present().gpus:
        if (found := target_of(gpu)) is not None:
            return found
    pytest.skip("no GPU that a target fits: `fusegen doctor` says why")


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Print what was measured, and write it where FUSEGEN_REPORT_DIR says."""
    FIGURES.clear()
    yield
    if not FIGURES:
        return
    print(f"\n\n{'chain':<24} {'dtype':<5} {'size':<13} {'rel L2':>8} {'err/bound':>9} {'run us':>9} {'compile s':>9}")
    for f in FIGURES:
        print(f"{f.chain:<24} {f.dtype:<5} {f.size:<13} {f.relative_l2:>8.1e} {f.share:>9.3f} {f.run_us:>9.1f} "
              f"{f.compile_s:>9.2f}  {f.regime}")  # fmt: skip
    if folder := os.environ.get("FUSEGEN_REPORT_DIR"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "validation.json").write_text(json.dumps([asdict(f) for f in FIGURES], indent=1))


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- operands


def sizes_with(graph: Graph, rows: int, cols: int, outer: tuple[int, ...]) -> dict[str, int]:
    """Sizes of every dim; leading axes beyond the second-last take `outer`, from the right."""
    leading = [str(size) for size in graph.shape[:-1]]
    sizes = {**graph.sizes, **sizes_at(graph, cols)}
    for name, size in zip(reversed(leading[:-1]), reversed(outer), strict=False):
        sizes[name] = size
    if leading:
        others = prod(sizes[name] for name in leading[:-1])
        sizes[leading[-1]] = max(1, rows // others)
    return sizes


def operand(tensor: Tensor, sizes: Mapping[str, int], generator: Any) -> Any:
    """Unit scale; most of a mask kept, and of a batch of masks the last one not at all."""
    shape = [size_of(size, sizes) for size in tensor.shape]
    if not shape:
        return 0.7109375 if tensor.dtype is f32 else 3
    dtype = getattr(torch, tensor.dtype.numpy_name)
    if tensor.dtype is b8:
        mask = torch.rand(shape, device=PLACE, generator=generator) < 0.7
        if shape[0] > 1:
            mask[-1] = False
        return mask
    if tensor.dtype.kind == "int":
        high = min(size_of(tensor.shape[-1], sizes) + 2, int(tensor.dtype.largest))
        return torch.randint(0, high, shape, device=PLACE, generator=generator, dtype=dtype)
    return torch.randn(shape, device=PLACE, generator=generator).to(dtype)


def operands_at(graph: Graph, sizes: Mapping[str, int], seed: int = 0) -> list[Any]:
    generator = torch.Generator(device=PLACE).manual_seed(seed)
    return [operand(tensor, sizes, generator) for tensor in graph.inputs]


def host(value: Any, dtype: DType) -> Any:
    """A tensor's values as numpy has them."""
    if not hasattr(value, "cpu"):
        return value
    array = value.contiguous().cpu()
    return array.view(BITS[dtype.bytes]).numpy().view(dtype.numpy)


def as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


# ---------------------------------------------------------------- checks


def picks_for(graph: Graph, sizes: Mapping[str, int], most: int = SAMPLE) -> dict[str, list[int]]:
    """Which indices of each leading dim to sample: first, last and some between; all where rows know their index."""
    counted = str(graph.shape[-2]) if any(n.op.name == "row_index" for n in graph.nodes) else ""
    leading = [str(size) for size in dict.fromkeys(graph.shape[:-1]) if isinstance(size, Dim)]
    room = max(1, most // graph.cols // (sizes[counted] if counted else 1))
    picks = {}
    for name in reversed(leading):
        count = sizes[name] if name == counted else min(sizes[name], room)
        places = np.unique(np.linspace(0, sizes[name] - 1, count).astype(int))
        picks[name] = [int(p) for p in places]
        room = max(1, room // (1 if name == counted else len(places)))
    return picks


def sampled(graph: Graph, tensors: list[Any], sizes: Mapping[str, int], picks: Mapping[str, list[int]]) -> Operands:
    """The picked rows of every operand, on the host."""
    few = [pick(t, value, picks) for t, value in zip(graph.inputs, tensors, strict=True)]
    values = tuple(host(v, t.dtype) for v, t in zip(few, graph.inputs, strict=True))
    return Operands({**sizes, **{n: len(p) for n, p in picks.items()}}, values, ())


def pick(tensor: Tensor, value: Any, picks: Mapping[str, list[int]]) -> Any:
    for axis, size in enumerate(tensor.shape):
        if isinstance(size, Dim) and size.name in picks and len(picks[size.name]) < value.shape[axis]:
            value = value.index_select(axis, torch.tensor(picks[size.name], device=value.device))
    return value


def check_sample(
    kernel: Kernel, tensors: list[Any], got: tuple[Any, ...], sizes: Mapping[str, int]
) -> tuple[float, int, list[float]]:
    """Sampled rows against the law: the share of the bound used, how many elements, and each output's largest bound."""
    graph = kernel.plan.graph
    picks = picks_for(graph, sizes)
    operands = sampled(graph, tensors, sizes, picks)
    laws = analyse(kernel.plan, operands.values)
    outputs = [host(pick(t, g, picks), t.dtype) for t, g in zip(graph.outputs, got, strict=True)]
    expected = as_tuple(reference(graph)(*operands.values))
    compared, doubt = judge(graph, accumulations(kernel.plan), operands.values, outputs, expected)
    found = figures(compared)
    assert not doubt, doubt
    assert not found.wrong, f"{found.wrong} of {found.elements} sampled elements are wrong: {found.worst}"
    assert found.bounded >= 0.99, f"only {found.bounded:.1%} of the sample have a bound"
    largest = [float(np.max(law.error, initial=0.0, where=np.isfinite(law.error))) for law in laws]
    return found.share, found.elements, largest


def check_all(kernel: Kernel, tensors: list[Any], got: tuple[Any, ...], errors: list[float]) -> float:
    """Every element against the reference text in float64 on the GPU; the worst output's relative L2."""
    graph = kernel.plan.graph
    expected = torch_reference(kernel.source.reference, kernel.plan.name, PLACE)(*tensors)
    worst = 0.0
    for tensor, found, law, error in zip(graph.outputs, got, expected, errors, strict=True):
        law = law.expand(found.shape)
        if tensor.dtype.kind != "float":
            assert (found == law).float().mean().item() > 0.999
            continue
        wide = found.double()
        off = (wide - law).abs_()
        off[(wide == law) | (wide.isnan() & law.isnan())] = 0.0
        allowed = law.abs() * (tensor.dtype.epsilon * 1.01) + (MARGIN * error + tensor.dtype.tiny)
        bad = ~(off <= allowed)
        if bad.any().item():
            pytest.fail(f"{tensor.name}: {int(bad.sum())} of {bad.numel()} elements are off, first at {first(bad)}")
        scale = law[law.isfinite()].square_().sum().sqrt().item()
        l2 = off.square_().sum().sqrt().item() / scale if scale else 0.0
        limit = 1e-5 if tensor.dtype is f32 else tensor.dtype.epsilon
        if scale:  # subnormals have no relative precision
            limit += tensor.dtype.tiny / 2 * law.numel() ** 0.5 / scale
        assert l2 <= limit, f"{tensor.name}: relative L2 is {l2:.1e}, above {limit:.1e}"
        worst = max(worst, l2)
    return worst


def first(bad: Any) -> list[int]:
    return [int(i) for i in np.unravel_index(int(bad.flatten().int().argmax()), tuple(bad.shape))]


def same_bits(one: Any, other: Any) -> bool:
    raw = BITS[one.element_size()]
    return bool(torch.equal(one.contiguous().view(raw), other.contiguous().view(raw)))


def check_invariance(kernel: Kernel, tensors: list[Any], got: tuple[Any, ...], sizes: Mapping[str, int]) -> None:
    """Again, and some rows alone: bit for bit the same."""
    graph = kernel.plan.graph
    for one, again in zip(got, as_tuple(kernel(*tensors)), strict=True):
        assert same_bits(one, again), "the same call gave other bits"
    picks = picks_for(graph, sizes, SAMPLE // 4)
    few = [pick(t, v, picks) for t, v in zip(graph.inputs, tensors, strict=True)]
    for tensor, one, alone in zip(graph.outputs, got, as_tuple(kernel(*few)), strict=True):
        assert same_bits(pick(tensor, one, picks), alone), "rows alone gave other bits than among others"


def time_of(run: Callable[[], object]) -> float:
    """µs of one warm call."""
    if PLACE != "cuda":
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def kernel_for(found: Chain, target: Target, cols: int, dtype: str) -> Kernel:
    spec = found.with_dtype(DTYPES[dtype]).at(**sizes_at(found.graph, cols))
    return fusegen.compile(spec, target=target, on="gpu" if PLACE == "cuda" else "emulator")


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("name", SPECS)
def test_real_sizes(name: str, dtype: str, size: str, target: Target) -> None:
    rows, cols, outer = SIZES[size]
    started = time.perf_counter()
    kernel = kernel_for(SPECS[name], target, cols, dtype)
    compiled = time.perf_counter() - started
    graph = kernel.plan.graph
    sizes = sizes_with(graph, rows, cols, outer)
    tensors = operands_at(graph, sizes)
    got = as_tuple(kernel(*tensors))
    share, elements, errors = check_sample(kernel, tensors, got, sizes)
    relative_l2 = check_all(kernel, tensors, got, errors)
    check_invariance(kernel, tensors, got, sizes)
    taken = time_of(lambda: kernel(*tensors, out=got if len(got) > 1 else got[0]))
    FIGURES.append(Figure(name, dtype, size, kernel.plan.regime, relative_l2, share, elements, taken, compiled))


@pytest.mark.parametrize("cols", [1, 31, 1000, 4097])
@pytest.mark.parametrize("name", SPECS)
def test_full_validation(name: str, cols: int, target: Target) -> None:
    """Row counts, layouts, malice, guards and poison, on the GPU."""
    found = SPECS[name]
    kernel = kernel_for(found, target, cols, "f32" if cols == 1000 else "f16")
    report: Report = validate(kernel, seed=1)
    report.raise_for_error()


def padded(value: Any, more: int) -> Any:
    """The same values with `more` elements between rows, at the same address modulo a row."""
    wide = torch.full((*value.shape[:-1], value.shape[-1] + more), 77.0, device=PLACE).to(value.dtype)
    view = wide[..., : value.shape[-1]]
    view.copy_(value)
    return view


def moved(value: Any) -> Any:
    """The same values at an address one element past an aligned one."""
    flat = torch.empty(value.numel() + 1, dtype=value.dtype, device=PLACE)
    view = flat[1:].view(value.shape)
    view.copy_(value)
    return view


VIEWS: Mapping[str, Callable[[Any], Any]] = {
    "padded by 8": lambda v: padded(v, 8),
    "padded by 1": lambda v: padded(v, 1),
    "misaligned": moved,
    "transposed": lambda v: v.transpose(0, 1).contiguous().transpose(0, 1) if v.dim() > 2 else v,
    "expanded": lambda v: v[:1].expand(v.shape) if v.dim() > 1 else v,
}


@pytest.mark.parametrize("how", VIEWS)
@pytest.mark.parametrize("name", SPECS)
def test_strided_and_misaligned_views(name: str, how: str, target: Target) -> None:
    kernel = kernel_for(SPECS[name], target, 1024, "bf16")
    graph = kernel.plan.graph
    sizes = sizes_with(graph, 1536, 1024, (2, 3))
    plain = operands_at(graph, sizes, seed=2)
    tensors = [VIEWS[how](v) if hasattr(v, "dim") else v for v in plain]
    got = as_tuple(kernel(*tensors))
    check_sample(kernel, tensors, got, sizes)
    if how == "expanded":
        return
    outs = tuple(VIEWS[how](torch.zeros_like(g)) for g in got)  # outputs that lie as oddly as the operands
    kernel(*tensors, out=outs if len(outs) > 1 else outs[0])
    for one, other in zip(got, outs, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=2 * bf16.epsilon, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", ["rmsnorm", "bias_relu", "scale_causal_softmax"])
def test_rows_that_lie_beyond_32_bits(name: str, target: Target) -> None:
    """Row offsets of 2^31 elements and more: an offset that wraps lands elsewhere."""
    kernel = kernel_for(SPECS[name], target, 1024, "f16")
    graph = kernel.plan.graph
    sizes = sizes_with(graph, 3, 1024, (1, 1))
    if PLACE == "cuda" and torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of GPU memory")
    step = 2**31 + 8

    def far(value: Any) -> Any:
        strides = (*(step * 3 for _ in value.shape[:-2]), step, 1)
        room = torch.empty(2 * step + 1024, dtype=value.dtype, device=PLACE)
        return room.as_strided(value.shape, strides).copy_(value)

    plain = operands_at(graph, sizes, seed=3)
    tensors = [far(v) if hasattr(v, "dim") and v.dim() == len(graph.shape) else v for v in plain]
    out = far(torch.zeros(tuple(size_of(s, sizes) for s in graph.outputs[0].shape), dtype=torch.float16, device=PLACE))
    kernel(*tensors, out=out)
    check_sample(kernel, tensors, (out,), sizes)


@pytest.mark.parametrize("name", ["copy", "swiglu_elementwise"])
def test_flat_arrays_of_more_than_32_bits(name: str, target: Target) -> None:
    kernel = kernel_for(SPECS[name], target, 4096, "bf16")
    if not kernel.plan.flat:
        pytest.skip(f"{name} is not planned flat here")
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GB of GPU memory")
    graph = kernel.plan.graph
    sizes = {**graph.sizes, str(graph.shape[0]): 1, str(graph.shape[-1]): FLAT_SAMPLE}
    shape = (*(1 for _ in graph.shape[:-1]), FLAT_SAMPLE)
    tensors = [torch.randn(shape, dtype=torch.bfloat16, device=PLACE) for _ in graph.inputs]
    got = as_tuple(kernel(*tensors))
    for part in (slice(0, SAMPLE), slice(2**31 - SAMPLE // 2, FLAT_SAMPLE)):
        few = [v[..., part] for v in tensors]
        check_sample(kernel, few, tuple(g[..., part] for g in got), {**sizes, str(graph.shape[-1]): few[0].shape[-1]})
