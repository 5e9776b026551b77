"""Arrays of any library as views, and a chain's operands against the arrays of one call."""

from __future__ import annotations

import ctypes
import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusegen import b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.errors import ArgumentError
from fusegen.language.spec import Chain
from fusegen.language.types import DTYPES, DType
from fusegen.planner import candidates, plan
from fusegen.planner.model import Access, Layout, Plan
from fusegen.runtime.arguments import (
    bind,
    check_dtypes,
    check_overlap,
    check_strides,
    layout_needed,
    measure,
    one_place,
    overlap,
    scalar,
)
from fusegen.runtime.arrays import CPU, ArrayView, contiguous_strides, view
from fusegen.targets import H200

torch = pytest.importorskip("torch", reason="torch is missing: pip install torch")

B, S, M, N = dims("B S M N")


@chain(M=4, N=64)
def bias_add(x: f16[M, N], bias: f16[N]) -> f16[M, N]:
    """Not flat: a vector operand."""
    return x + bias


@chain(M=4, N=64)
def add(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
    """Flat."""
    return x + y


@chain(M=4, N=64)
def normalize(x: f16[M, N], scale: f32[M, 1]) -> f16[M, N]:
    """A number a row."""
    return F.softmax(x * scale)


@chain(B=3, S=5, N=64)
def scores(x: f16[B, S, N], mask: b8[B, 1, N]) -> f16[B, S, N]:
    """Three axes, of which the mask moves along two."""
    return F.softmax(F.where(mask, x, -1.0))


@chain(B=3, S=5, N=64)
def rows3(x: f16[B, S, N], bias: f16[N]) -> f16[B, S, N]:
    """Two row axes that merge."""
    return F.softmax(x + bias)


@chain(M=4, N=37)
def odd(x: f16[M, N]) -> f16[M, N]:
    """A row length that no vector divides."""
    return F.softmax(x)


def planned(spec: Chain, layout: Layout | None = None) -> Plan:
    return plan(spec.graph, H200, layout=layout or Layout())


def across(spec: Chain, layout: Layout | None = None) -> Plan:
    """The cheapest plan that reads x across blocks, or the cheapest of all where none does."""
    plans = candidates(spec.graph, H200, layout or Layout()).plans
    return next((p for p in plans if p.misaligned_rows), plans[0])


def made(dtype: DType, *shape: int, strides: tuple[int, ...] | None = None, address: int = 1 << 20) -> ArrayView:
    """A view of memory that nobody reads."""
    return ArrayView(address, dtype, shape, strides or contiguous_strides(shape), library="torch")


def access_of(p: Plan, tensor: str) -> Access:
    return next(a for a in p.accesses if a.tensor == tensor)


# ---------------------------------------------------------------- views


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_numpy_view(dtype: DType) -> None:
    array = np.zeros((6, 8), dtype.numpy)[1:, ::-2]
    v = view(array)
    assert (v.address, v.dtype, v.shape) == (array.ctypes.data, dtype, (5, 4))
    assert (v.strides, v.device, v.library, v.writable) == ((8, -2), CPU, "numpy", True)
    assert v.numpy().ctypes.data == array.ctypes.data


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_torch_view(dtype: DType) -> None:
    tensor = torch.zeros((6, 8), dtype=getattr(torch, dtype.numpy.name))[1:, ::2]
    v = view(tensor)
    assert (v.address, v.dtype, v.shape) == (tensor.data_ptr(), dtype, (5, 4))
    assert (v.strides, v.device, v.library) == ((8, 2), CPU, "torch")


class Exporter:
    """Shows a tensor through DLPack alone."""

    def __init__(self, tensor: Any, old: bool = False) -> None:
        self.tensor, self.old = tensor, old

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.tensor.__dlpack_device__()
        return device

    def __dlpack__(self, **options: Any) -> object:
        if self.old and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.tensor.__dlpack__(**options)


@pytest.mark.parametrize("old", [False, True], ids=["versioned", "unversioned"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_dlpack_view(dtype: DType, old: bool) -> None:
    tensor = torch.zeros((6, 8), dtype=getattr(torch, dtype.numpy.name))[1:, ::2]
    v = view(Exporter(tensor, old))
    assert (v.address, v.dtype, v.shape, v.strides, v.device) == (tensor.data_ptr(), dtype, (5, 4), (8, 2), CPU)


def test_dlpack_view_keeps_and_frees_the_export() -> None:
    tensor = torch.zeros(8)
    alive = weakref.ref(tensor)
    v = view(Exporter(tensor))
    del tensor
    gc.collect()
    assert alive() is not None
    del v
    gc.collect()
    assert alive() is None


def test_dlpack_read_only_array() -> None:
    array = np.zeros(8, np.float32)
    array.flags.writeable = False
    assert not view(Exporter(array)).writable
    assert not view(array).writable


class Exposed:
    """An array that only has `__cuda_array_interface__`."""

    def __init__(self, ordinal: int, **interface: object) -> None:
        self.device = type("Device", (), {"id": ordinal})()
        self.__cuda_array_interface__ = interface


@pytest.mark.parametrize("version", [2, 3])
def test_cuda_array_interface(version: int) -> None:
    v = view(Exposed(3, shape=(2, 3), typestr="<f2", data=(4096, True), version=version, strides=(16, 2)))
    assert v == ArrayView(4096, f16, (2, 3), (8, 1), ("cuda", 3), False, v.library)


def test_cuda_array_interface_without_strides_or_data() -> None:
    v = view(Exposed(0, shape=(0, 3), typestr="<i4", data=(0, False), version=3))
    assert (v.dtype, v.strides, v.span) == (i32, (3, 1), (0, 0))


def test_view_of_a_view_is_itself() -> None:
    v = made(f16, 2, 3)
    assert view(v) is v


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # torch's: they are a prototype
    NESTED = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)])


@pytest.mark.parametrize(
    ("array", "words"),
    [
        ([1.0, 2.0], "x is a list, and a kernel takes arrays"),
        (3.0, "x is a float, and a kernel takes arrays"),
        (np.zeros(3), "x holds float64, which no operand of a chain can"),
        (np.zeros(3, ">f4"), "foreign byte order"),
        (torch.zeros(3, dtype=torch.int16), "x holds torch.int16"),
        (torch.zeros(3, 3).to_sparse(), "pass .to_dense()"),
        (torch.zeros(3, device="meta"), "x is on torch device meta"),
        (NESTED, "x is a nested tensor"),
        (np.ma.masked_array(np.zeros(3, np.float32)), "x is a masked array"),
        (Exposed(0, shape=(3,), data=(4096, False)), "__cuda_array_interface__ without 'typestr'"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, "lazily negated"),
        (Exporter(torch.zeros(3, dtype=torch.int16)), "x holds int16"),
        (Exporter(torch.zeros(3, dtype=torch.complex64)), "x holds"),
        (np.zeros(3, [("a", "f4"), ("b", "i2")])["a"], "not whole elements of 4 bytes"),
        (np.zeros(17, np.uint8)[1:].view(np.float32), "not a multiple of its elements' 4 bytes"),
    ],
)
def test_what_is_no_operand(array: object, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        view(array, "x")
    assert words in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: Any) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)], layout=layout)
    with pytest.raises(ArgumentError, match=r"x is a nested tensor; .* pass .to_padded_tensor\(0\)"):
        view(nested, "x")


def test_subclasses_are_still_tensors() -> None:
    class Mine(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    with torch.no_grad():
        assert view(torch.nn.Parameter(torch.zeros(3))).library == "torch"
    with pytest.raises(ArgumentError, match=r"w requires a gradient, and a kernel computes none: .*\n.*w.detach\(\)"):
        view(torch.nn.Parameter(torch.zeros(3)), "w")
    assert view(torch.zeros(3).as_subclass(Mine)).library == "torch"


def test_numpy_of_a_view_keeps_the_memory() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    copy = array.copy()
    seen = view(array[::-1, 1:]).numpy()
    del array
    gc.collect()
    assert np.array_equal(seen, copy[::-1, 1:])


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    strides=st.lists(st.integers(-9, 9), min_size=4, max_size=4),
    dtype=st.sampled_from(list(DTYPES.values())),
)
def test_span_holds_every_element_and_no_more(shape: list[int], strides: list[int], dtype: DType) -> None:
    v = made(dtype, *shape, strides=tuple(strides[: len(shape)]))
    bytes_of = [
        v.address + dtype.bytes * sum(i * s for i, s in zip(index, v.strides, strict=True))
        for index in np.ndindex(*shape)
    ]
    expected = (min(bytes_of), max(bytes_of) + dtype.bytes) if bytes_of else (v.address, v.address)
    assert v.span == expected


# ---------------------------------------------------------------- sizes


def test_measure_gives_each_dim_one_size() -> None:
    sizes = measure(planned(bias_add), {"x": made(f16, 7, 64), "bias": made(f16, 64)})
    assert (sizes.by_name, sizes.shape) == ({"M": 7, "N": 64}, (7, 64))


@pytest.mark.parametrize(
    ("spec", "views", "words"),
    [
        (bias_add, {"x": made(f16, 4, 64), "bias": made(f16, 65)},
         ["bias on axis 0 has 65", "64 already, from x on axis 1"]),
        (bias_add, {"x": made(f16, 4, 37), "bias": made(f16, 64)},
         ["for N=64, and x on axis 1 has 37", "bias_add.at(N=37)"]),
        (bias_add, {"x": made(f16, 4, 37), "bias": made(f16, 37)},
         ["for N=64, and x on axis 1 has 37", "bias_add.at(N=37)"]),
        (bias_add, {"x": made(f16, 64), "bias": made(f16, 64)}, ["x has 1 axis, shape (64,)", "f16[M, N]"]),
        (bias_add, {"x": made(f16, 1, 4, 64), "bias": made(f16, 64)}, ["x has 3 axes", "array of 2 axes"]),
        (normalize, {"x": made(f16, 4, 64), "scale": made(f32, 4, 2)}, ["scale on axis 1 has 2", "exactly 1 there"]),
        (add, {"x": made(f32, 4, 64), "y": made(f32, 1, 64)}, ["y on axis 0 has 1, and M is 4", "expand it to 4"]),
        (add, {"x": made(f32, 4, 64), "y": made(f32, 4, 64), "out": made(f32, 5, 64)}, ["out on axis 0 has 5"]),
    ],
)  # fmt: skip
def test_sizes_that_differ(spec: Chain, views: dict[str, ArrayView], words: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        measure(planned(spec), views)
    for word in words:
        assert word in str(caught.value)


def test_a_flat_kernel_takes_any_row_length() -> None:
    p = planned(add)
    assert p.flat
    assert measure(p, {"x": made(f32, 3, 37), "y": made(f32, 3, 37)}).shape == (3, 37)


def test_a_size_that_the_text_counts_is_a_constant() -> None:
    @chain(M=4, N=64)
    def counted(x: f32[M, N]) -> f32[M, N]:
        return x / F.size(N)

    assert planned(counted).flat
    with pytest.raises(ArgumentError, match=r"compiled for N=64, and x on axis 1 has 5"):
        measure(planned(counted), {"x": made(f32, 4, 5)})


# ---------------------------------------------------------------- dtype, place, strides


def test_wrong_dtype_says_how_to_convert() -> None:
    views = {"x": made(f32, 4, 64), "bias": made(f16, 64)}
    with pytest.raises(ArgumentError, match=r"x holds f32.*f16\[M, N\]\n  pass x\.to\(torch\.float16\)"):
        check_dtypes(bias_add.graph, views)
    views = {"x": replace(made(f32, 4, 64), library="numpy"), "bias": made(f16, 64)}
    with pytest.raises(ArgumentError, match=r"pass x\.astype\('float16'\)"):
        check_dtypes(bias_add.graph, views)


def test_a_wrong_output_is_not_to_be_copied() -> None:
    x, bias = made(f16, 4, 64), made(f16, 64)
    with pytest.raises(ArgumentError, match=r"out holds f32, and bias_add writes f16\[M, N\]\n  pass an out= of that"):
        check_dtypes(bias_add.graph, {"x": x, "bias": bias, "out": made(f32, 4, 64)})
    turned = replace(made(f16, 4, 64), strides=(1, 4))
    with pytest.raises(ArgumentError, match=r"and a kernel writes rows whose.*\n  pass an out= of that"):
        check_strides(planned(bias_add), {"x": x, "bias": bias, "out": turned})


def test_two_places() -> None:
    views = {"x": made(f16, 4, 64), "bias": replace(made(f16, 64), device=("cuda", 1))}
    with pytest.raises(ArgumentError, match="x is on the CPU and bias on cuda:1"):
        one_place(views)


def test_rows_must_be_contiguous() -> None:
    views = {"x": made(f16, 4, 64, strides=(1, 4)), "bias": made(f16, 64)}
    with pytest.raises(ArgumentError, match=r"x has a stride of 4 .* last axis.*\n  pass x\.contiguous\(\)"):
        check_strides(planned(bias_add), views)


def test_rows_of_one_element_and_numbers_a_row_may_have_any_stride() -> None:
    check_strides(planned(normalize), {"x": made(f16, 4, 64), "scale": made(f32, 4, 1, strides=(1, 77))})
    check_strides(planned(add.at(N=1)), {"x": made(f32, 4, 1, strides=(5, 9)), "y": made(f32, 4, 1)})


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (replace(made(f32, 4, 64), writable=False), "read-only"),
        (replace(made(f32, 4, 64), writable=False, library="jax"), "JAX arrays are immutable"),
        (made(f32, 4, 64, strides=(0, 1)), "overlaps itself"),
        (made(f32, 4, 64, strides=(63, 1)), "overlaps itself"),
    ],
)
def test_outputs_that_can_not_be_written(out: ArrayView, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        check_strides(planned(add), {"x": made(f32, 4, 64), "y": made(f32, 4, 64), "out": out})


# ---------------------------------------------------------------- overlap


def elements(v: ArrayView) -> set[int]:
    return {
        v.address + v.dtype.bytes * sum(i * s for i, s in zip(index, v.strides, strict=True)) + b
        for index in np.ndindex(*v.shape)
        for b in range(v.dtype.bytes)
    }


@given(
    shapes=st.tuples(*[st.tuples(st.integers(1, 4), st.integers(1, 6))] * 2),
    rows=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    offset=st.integers(-30, 30),
)
def test_overlap_misses_nothing(
    shapes: tuple[tuple[int, int], tuple[int, int]], rows: tuple[int, int], offset: int
) -> None:
    a = made(f16, *shapes[0], strides=(rows[0], 1))
    b = made(f16, *shapes[1], strides=(rows[1], 1), address=(1 << 20) + 2 * offset)
    if elements(a) & elements(b):
        assert overlap(a, b)
    if rows[0] == rows[1] and rows[0] >= max(shapes[0][1], shapes[1][1]):  # columns of one buffer: exact
        circle = 2 * rows[0]
        ahead = (2 * offset) % circle
        apart = 2 * shapes[0][1] <= ahead and ahead + 2 * shapes[1][1] <= circle
        assert not (apart and overlap(a, b))


def test_columns_of_one_buffer_do_not_overlap() -> None:
    left = made(f16, 8, 64, strides=(192, 1))
    right = made(f16, 8, 64, strides=(192, 1), address=(1 << 20) + 2 * 64)
    assert not overlap(left, right)
    assert overlap(left, replace(right, address=right.address - 2))
    assert not overlap(left, replace(left, shape=(0, 64)))


def test_outputs_do_not_share_memory() -> None:
    x, y = made(f32, 4, 64), made(f32, 4, 64, address=1 << 22)
    with pytest.raises(
        ArgumentError, match=r"the output b shares memory with the output a\n.*each output needs its own"
    ):
        check_overlap("spec", frozenset(), {"x": x}, {"a": y, "b": replace(y, address=y.address + 4)})
    assert check_overlap("spec", frozenset(), {"x": x, "same": x}, {"out": y}) == frozenset()  # inputs may


# ---------------------------------------------------------------- layout


@pytest.mark.parametrize("spec", [bias_add, add, normalize, scores, rows3, odd], ids=lambda s: s.name)
def test_contiguous_arrays_fit_the_default_layout(spec: Chain) -> None:
    p = planned(spec)
    views = {t.name: made(t.dtype, *measure(p, {}).of(t)) for t in (*spec.graph.inputs, *spec.graph.outputs)}
    assert layout_needed(p, views) == Layout()


@pytest.mark.parametrize(
    ("x", "layout"),
    [
        (made(f16, 4, 64), Layout()),
        (made(f16, 4, 64, strides=(72, 1)), Layout()),  # a longer row that vectors divide
        (made(f16, 4, 64, strides=(0, 1)), Layout()),  # one row, expanded
        (made(f16, 4, 64, strides=(-64, 1)), Layout()),  # rows in reverse
        (made(f16, 4, 64, strides=(65, 1)), Layout(unaligned=frozenset("x"))),
        (made(f16, 1, 64, strides=(65, 1)), Layout()),  # a single row has no stride
        (made(f16, 4, 64, address=(1 << 20) + 2), Layout(unaligned=frozenset("x"))),
        (made(f16, 0, 64, strides=(65, 1), address=2), Layout()),  # nothing is read
    ],
)
def test_layout_of_rows(x: ArrayView, layout: Layout) -> None:
    assert layout_needed(planned(bias_add), {"x": x, "bias": made(f16, 64)}) == layout


def test_layout_of_a_flat_plan() -> None:
    p = planned(add)
    good = made(f32, 4, 64)
    assert layout_needed(p, {"x": good, "y": replace(good, address=4)}) == Layout(unaligned=frozenset("y"))
    assert layout_needed(p, {"x": good, "y": made(f32, 4, 64, strides=(80, 1))}) == Layout(split=True)
    assert layout_needed(p, {"x": good, "y": made(f32, 4, 64, strides=(0, 1))}) == Layout(split=True)
    assert layout_needed(p, {"x": made(f32, 1, 1, strides=(7, 9)), "y": made(f32, 1, 1)}) == Layout()
    split = planned(add, Layout(split=True))
    assert layout_needed(split, {"x": good, "y": made(f32, 4, 64, strides=(81, 1))}) == Layout(True, frozenset("y"))


def test_layout_of_merged_axes() -> None:
    p = planned(rows3)
    bias = made(f16, 64)
    assert len(p.row_dims) == 1
    assert layout_needed(p, {"x": made(f16, 3, 5, 64), "bias": bias}) == Layout()
    assert layout_needed(p, {"x": made(f16, 3, 5, 64, strides=(5 * 128, 128, 1)), "bias": bias}) == Layout()
    gaps = made(f16, 3, 5, 64, strides=(8 * 64, 64, 1))
    assert layout_needed(p, {"x": gaps, "bias": bias}) == Layout(split=True)
    assert layout_needed(p, {"x": made(f16, 1, 5, 64, strides=(9, 64, 1)), "bias": bias}) == Layout()
    assert layout_needed(p, {"x": made(f16, 3, 1, 64, strides=(64, 7, 1)), "bias": bias}) == Layout()
    assert layout_needed(p, {"x": made(f16, 3, 5, 64, strides=(0, 64, 1)), "bias": bias}) == Layout(split=True)
    transposed = made(f16, 3, 5, 64, strides=(64, 3 * 64, 1))
    assert layout_needed(p, {"x": transposed, "bias": bias}) == Layout(split=True)
    split = planned(rows3, Layout(split=True))
    assert layout_needed(split, {"x": transposed, "bias": bias}) == Layout(split=True)
    assert layout_needed(split, {"x": made(f16, 3, 5, 64), "bias": bias}) == Layout(split=True)  # never narrower


def test_layout_of_rows_that_start_anywhere() -> None:
    p = across(odd)
    assert access_of(p, "x").mode == "misaligned"
    assert layout_needed(p, {"x": made(f16, 4, 37)}) == Layout()
    assert layout_needed(p, {"x": made(f16, 4, 37, strides=(38, 1))}) == Layout()
    assert layout_needed(p, {"x": made(f16, 4, 37, strides=(0, 1))}) == Layout()
    assert layout_needed(p, {"x": made(f16, 4, 37, strides=(-38, 1))}) == Layout(unaligned=frozenset("x"))
    assert layout_needed(p, {"x": made(f16, 1, 37, strides=(-38, 1))}) == Layout()
    assert layout_needed(p, {"x": made(f16, 4, 37, address=2)}) == Layout(unaligned=frozenset("x"))


@given(
    sizes=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    steps=st.tuples(st.integers(-2000, 2000), st.integers(-2000, 2000)),
    shift=st.integers(0, 8),
    length=st.sampled_from([64, 37, 36]),
    planned=st.sampled_from([planned, across]),
)
def test_asking_for_layouts_ends_in_one_that_reads_right(
    sizes: tuple[int, int], steps: tuple[int, int], shift: int, length: int, planned: Callable[..., Plan]
) -> None:
    """Whatever the strides: the plan that is reached finds every row where numpy finds it, aligned as its mode asks."""
    spec = rows3.at(N=length)
    x = made(f16, *sizes, length, strides=(*steps, 1), address=(1 << 20) + 2 * shift)
    views = {"x": x, "bias": made(f16, length), "out": made(f16, *sizes, length)}
    p = planned(spec)
    for _ in range(3):
        layout = layout_needed(p, views)
        if layout == p.layout:
            break
        p = planned(spec, layout)
    assert layout_needed(p, views) == p.layout
    bound = bind(p, measure(p, views), views)
    assert bound.rows == sizes[0] * sizes[1]
    numbers = dict(zip((q.name for q in p.params if q.kind in ("extent", "stride")), bound.numbers, strict=True))
    access = access_of(p, "x")
    strides = [q.name for q in p.params if q.kind == "stride" and q.tensor == "x"]
    extents = [numbers[dim.extent] for dim in p.row_dims]
    for at, index in enumerate(np.ndindex(*sizes)):
        where = np.unravel_index(at, extents) if extents else ()
        offset = sum(int(i) * numbers[s] for i, s in zip(where, strides, strict=True))
        assert offset == sum(i * s for i, s in zip(index, steps, strict=True))
        if access.mode == "vector":
            assert (x.address + 2 * offset) % access.vector_bytes == 0
        if access.mode == "misaligned":
            assert x.address % access.vector_bytes == 0
            assert offset >= 0, "no block begins before the tensor"


# ---------------------------------------------------------------- bind


def test_bind_orders_numbers_as_the_plan_does() -> None:
    p = planned(scores)
    views = {
        "x": made(f16, 3, 5, 64, strides=(5 * 80, 80, 1)),
        "mask": made(b8, 3, 1, 64, strides=(128, 64, 1)),
        "out": made(f16, 3, 5, 64),
    }
    bound = bind(p, measure(p, views), views)
    names = [q.name for q in p.params if q.kind in ("extent", "stride")]
    assert dict(zip(names, bound.numbers, strict=True)) == {
        "B_size": 3, "S_size": 5, "x_stride_B": 400, "x_stride_S": 80, "mask_stride_B": 128, "out_stride_B": 320,
        "out_stride_S": 64,
    }  # fmt: skip
    assert (bound.rows, bound.blocks) == (15, p.blocks(15))


def test_bind_of_no_rows_has_no_blocks() -> None:
    p = planned(bias_add)
    views = {"x": made(f16, 0, 64), "bias": made(f16, 64), "out": made(f16, 0, 64)}
    assert (bind(p, measure(p, views), views).rows, bind(p, measure(p, views), views).blocks) == (0, 0)


def test_bind_counts_in_64_bits() -> None:
    p = planned(bias_add)
    views = {"x": made(f16, 2**34, 64, strides=(2**33, 1)), "bias": made(f16, 64), "out": made(f16, 2**34, 64)}
    bound = bind(p, measure(p, views), views)
    assert (bound.rows, bound.numbers) == (2**34, (2**34, 2**33, 64))
    assert bound.blocks <= p.max_blocks


def test_more_rows_than_a_launch_takes_are_refused() -> None:
    p = planned(bias_add)
    views = {"x": made(f16, 2**40, 64), "bias": made(f16, 64), "out": made(f16, 2**40, 64)}
    with pytest.raises(ArgumentError, match=f"got {2**40} rows, and a launch on cuda:h200 takes {p.max_rows}"):
        bind(p, measure(p, views), views)


# ---------------------------------------------------------------- scalars


@chain(M=4, N=64)
def scaled(x: f32[M, N], scale: f32, shift: i32) -> f32[M, N]:
    """Run-time scalars of every kind."""
    return x * scale + F.cast(shift, f32)


@pytest.mark.parametrize(
    ("name", "value", "number"),
    [
        ("scale", 2, 2.0),
        ("scale", np.float64(0.5), 0.5),
        ("scale", ml_dtypes.bfloat16(1.5), 1.5),
        ("scale", float("inf"), float("inf")),
        ("scale", True, 1.0),
        ("shift", np.int64(-7), -7),
        ("shift", True, 1),
    ],
)
def test_scalars(name: str, value: object, number: float) -> None:
    tensor = next(t for t in scaled.graph.inputs if t.name == name)
    assert scalar(scaled.graph, tensor, value) == number


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("scale", 1e39, "a number of magnitude up to 3.4028235e+38"),
        ("scale", 10**400, "a number of magnitude"),
        ("scale", np.complex64(1j), "a number"),
        ("scale", np.str_("x"), "a number of magnitude"),
        ("scale", torch.tensor(1.0), "declare it scale: f32[1] in the spec"),
        ("scale", np.ones(1), "is a ndarray, and scaled takes scale: f32, a number\n  declare it scale: f32[1]"),
        ("scale", "2", "a number"),
        ("shift", 1.5, "a whole number"),
        ("shift", 2**31, "a whole number"),
    ],
)
def test_scalars_that_do_not_fit(name: str, value: object, words: str) -> None:
    tensor = next(t for t in scaled.graph.inputs if t.name == name)
    with pytest.raises(ArgumentError) as caught:
        scalar(scaled.graph, tensor, value)
    assert words in str(caught.value)
    assert f"scaled takes {name}: " in str(caught.value)


def test_nan_is_a_scalar() -> None:
    tensor = scaled.graph.inputs[1]
    assert np.isnan(scalar(scaled.graph, tensor, float("nan")))


def test_dlpack_structs_have_the_sizes_of_the_abi() -> None:
    from fusegen.runtime.arrays import DLManagedTensorVersioned, DLTensor

    assert (ctypes.sizeof(DLTensor), ctypes.sizeof(DLManagedTensorVersioned)) == (48, 80)
    assert bf16.numpy == np.dtype(ml_dtypes.bfloat16)
