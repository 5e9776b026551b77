"""Rows that are written where an index names some: programs against plain numpy, what a call gives, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Program, b8, bf16, chain, dims, f8e4m3, f32, i32, u8
from fusegen import ops as F
from fusegen.errors import ArgumentError, RequestError, SpecError
from fusegen.language.reference import reference
from fusegen.language.spec import Chain
from fusegen.measuring.operands import operands as operands_to_time
from fusegen.planner.model import Source
from fusegen.runtime import Kernel, finding
from fusegen.targets import target
from fusegen.validation import validate
from tests.specs import SHIPPED

pytestmark = pytest.mark.usefixtures("emulated_only")

B, D, H, M, N, S, V = dims("B D H M N S V")
Array = np.ndarray[Any, np.dtype[Any]]


@chain(V=29, M=12, N=40)
def plain(out: bf16[V, N], ids: i32[M], x: bf16[M, N]) -> bf16[V, N]:
    return F.scatter(out, ids, x)


@chain(V=29, M=12, N=41)
def normed(out: f32[V, N], ids: i32[M, 1], x: bf16[M, N], gain: bf16[N]) -> tuple[f32[V, N], f32[M, N]]:
    """Beside its own rows; none of a length that vectors divide."""
    y = F.rmsnorm(x, gain)
    return F.scatter(out, ids, y), y


@chain(V=29, B=2, S=6, H=3, D=16)
def heads(cache: f8e4m3[V, H, D], ids: i32[B, S], x: f32[B, S, H, D]) -> f8e4m3[V, H, D]:
    return F.scatter(cache, ids, x * 2.0)


@chain(V=29, M=12, N=24)
def read_again(out: f32[V, N], ids: i32[M], x: f32[M, N]) -> tuple[f32[V, N], f32[V, 1]]:
    """What is written is read by a kernel behind it."""
    new = F.scatter(out, ids, x)
    return new, F.sum(new)


@chain(V=29, M=12, N=24, D=8)
def multiplied(out: bf16[V, N], ids: i32[M], x: bf16[M, D], w: bf16[D, N]) -> bf16[V, N]:
    return F.scatter(out, ids, x @ w)


@chain(V=29, M=12, N=24)
def counted(out: i32[V, N], ids: i32[M], x: i32[M, N]) -> i32[V, N]:
    return F.scatter(out, ids, x + F.col_index(x))


@chain(V=29, M=12, N=24)
def one_value(out: f32[V, 1], ids: i32[M], x: f32[M, N]) -> f32[V, 1]:
    return F.scatter(out, ids, F.max(x))


@chain(V=29, M=12, N=24)
def marked(out: u8[V, N], flags: b8[V, N], ids: i32[M], x: i32[M, N]) -> tuple[u8[V, N], b8[V, N]]:
    """Two arrays by one index."""
    return F.scatter(out, ids, x), F.scatter(flags, ids, x > 3)


def put(out: Array, ids: Array, rows: Any) -> Array:
    """A loop, as no vectorized text is written."""
    found = np.array(out)
    for index, row in zip(ids.reshape(-1), rows.reshape(-1, *out.shape[1:]), strict=True):
        if 0 <= index < len(out):
            found[index] = row
    return found


def rms(x: Array, gain: Array) -> Array:
    wide = np.asarray(x, np.float64)
    return np.asarray(wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * np.asarray(gain, np.float64))


MEANINGS: dict[str, tuple[Chain, Callable[..., Any]]] = {
    one.name: (one, meaning)
    for one, meaning in (
        (plain, lambda out, ids, x: put(out, ids, x)),
        (normed, lambda out, ids, x, gain: (put(out, ids, rms(x, gain)), rms(x, gain))),
        (heads, lambda cache, ids, x: put(cache, ids, (x * 2).astype(cache.dtype))),
        (
            read_again,
            lambda out, ids, x: (put(out, ids, x), np.float64(put(out, ids, x)).sum(-1, keepdims=True)),
        ),
        (multiplied, lambda out, ids, x, w: put(out, ids, np.asarray(x, np.float64) @ np.asarray(w, np.float64))),
        (counted, lambda out, ids, x: put(out, ids, x + np.arange(x.shape[1]))),
        (one_value, lambda out, ids, x: put(out, ids, x.max(-1, keepdims=True))),
        (
            marked,
            lambda out, flags, ids, x: (put(out, ids, np.clip(x, 0, 255)), put(flags, ids, x > 3)),
        ),
    )
}


def operands(spec: Chain, seed: int = 0) -> list[Any]:
    """Places for some of the rows, each another one; of the others -1 and numbers far outside."""
    rng = np.random.default_rng(seed)
    found: list[Any] = []
    for tensor in spec.graph.inputs:
        shape = tuple(spec.graph.sizes.get(str(size), 1) for size in tensor.shape)
        if tensor.name == "ids":
            ids = np.resize([-1, 29, -(2**31), 2**31 - 1, -29], 12)
            ids[rng.permutation(12)[:7]] = rng.permutation(29)[:7]
            found.append(ids.reshape(shape).astype(np.int32))
        elif tensor.dtype.kind == "float":
            found.append(rng.standard_normal(shape).astype(tensor.dtype.numpy))
        else:
            found.append(rng.integers(-9, 9, shape).astype(tensor.dtype.numpy))
    return found


def made(spec: Chain, where: str = "cuda:h200", proven: bool = False) -> Program:
    program = fusegen.compile(spec, target=where, on="emulator", validate=proven)
    assert isinstance(program, Program)
    return program


def tupled(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("where", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize("name", MEANINGS)
def test_rows_go_where_the_index_says(name: str, where: str) -> None:
    spec, meaning = MEANINGS[name]
    program = made(spec, where)
    given = operands(spec)
    before = [np.array(one) for one in given]
    got = tupled(program(*given))
    wanted = tupled(meaning(*before))
    for tensor, one, law in zip(spec.graph.outputs, got, wanted, strict=True):
        if tensor.name in program.op_graph.updates:
            names = [t.name for t in program.inputs]
            assert one is given[names.index(program.op_graph.updates[tensor.name])]
        np.testing.assert_allclose(np.float64(one), np.float64(law), rtol=1e-2, atol=1e-3, err_msg=tensor.name)
    ids = before[[t.name for t in spec.graph.inputs].index("ids")]
    stays = np.setdiff1d(np.arange(29), ids)
    raw = [one.view(f"u{one.dtype.itemsize}") for one in (given[0], before[0])]
    assert np.array_equal(raw[0][stays], raw[1][stays])


@pytest.mark.parametrize("name", ["normed", "heads", "read_again", "multiplied", "one_value", "marked"])
def test_validation_passes(name: str) -> None:
    report = validate(made(MEANINGS[name][0]))
    assert report.ok, report


BROKEN = {
    "an index below 0 is followed": ("slots >= 0 && ", ""),
    "an index beyond the last row is followed": (" && slots < v_2_count", ""),
    "rows that have no place are written to the first": ("live && v_2_found", "live"),
    "an index of the row before": (
        "(v_2_found ? slots : 0) * v_2_stride",
        "(v_2_found ? slots - (slots > 0) : 0) * v_2_stride",
    ),
    "the head is left out": ("* v_2_stride + H_at * v_2_stride_H", "* v_2_stride"),
}


@pytest.mark.parametrize("models", BROKEN)
def test_validation_catches(models: str) -> None:
    """Deliberately broken kernels; what strays is reported by the checking emulator."""
    spec = SHIPPED["kv_cache_write"].at(T=5, H=3, D=32, P=11, V=20)
    program = made(spec)
    (kernel,) = program.kernels
    assert isinstance(kernel.source, Source)
    text = kernel.source.text.replace(*BROKEN[models])
    assert text != kernel.source.text

    def variant(layout: Any) -> Any:
        return replace(kernel.source, text=text), None

    broken = Kernel(replace(kernel.source, text=text), None, program.device, variant)
    assert not validate(Program(program.plan, (broken,), program.device), quick=True).ok


def test_two_rows_of_one_place_are_refused_by_the_reference() -> None:
    given = operands(plain)
    given[1][:] = 3
    with pytest.raises(ValueError, match="12 rows go to row 3, and each needs a place of its own"):
        reference(plain.graph)(*given)


def test_out_is_the_operand_or_left_away() -> None:
    program = made(plain)
    given = operands(plain)
    meant = put(np.array(given[0]), given[1], given[2])
    assert program(*given, out=given[0]) is given[0]
    assert np.array_equal(given[0], meant)
    with pytest.raises(ArgumentError, match="the output out_2 is out with new rows, in its own memory"):
        program(*given, out=np.array(given[0]))
    given[0].flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        program(*given)


def test_any_strides_and_no_rows() -> None:
    program = made(plain)
    out, ids, x = operands(plain)
    wide = np.zeros((29, 99), out.dtype)
    part = wide[:, 7:47]
    part[...] = out
    assert program(part, ids, x) is part
    assert np.array_equal(part, put(out, ids, x))
    assert not wide[:, :7].any()
    assert not wide[:, 47:].any()
    kept = np.array(out)
    program(out, ids[:0], x[:0])
    assert np.array_equal(out, kept)
    with pytest.raises(ArgumentError, match="has no rows, and plain writes some of them"):
        program(out[:0], ids, x)


def test_operands_to_time_have_a_place_for_each_row() -> None:
    device = finding.find(target("cuda:h200"), "emulator")
    found = operands_to_time(device, plain.graph)
    ids = found.inputs[1].numpy()
    assert len(set(ids.tolist())) == 12
    assert found.out is found.inputs[0]


def refused(said: str, body: Callable[[], Any]) -> None:
    with pytest.raises(SpecError, match=said):
        body()


def test_refusals() -> None:
    def computed() -> None:
        @chain(V=8, M=4, N=16)
        def wrong(out: f32[V, N], ids: i32[M], x: f32[M, N]) -> f32[V, N]:
            return F.scatter(out * 2.0, ids, x)

    def ids() -> None:
        @chain(V=8, M=4, N=16)
        def wrong(out: f32[V, N], ids: i32[M], x: f32[M, N]) -> f32[V, N]:
            return F.scatter(out, ids + 1, x)

    def shape() -> None:
        @chain(V=8, M=4, N=16)
        def wrong(out: f32[V, N], ids: i32[M], x: f32[V, N]) -> f32[V, N]:
            return F.scatter(out, ids, x)

    def lost() -> None:
        @chain(V=8, M=4, N=16)
        def wrong(out: f32[V, N], ids: i32[M], x: f32[M, N]) -> f32[V, N]:
            return F.scatter(out, ids, x) * 2.0

    def read() -> None:
        @chain(V=8, M=4, N=16)
        def wrong(out: f32[V, N], ids: i32[M], x: f32[M, N]) -> tuple[f32[V, N], f32[V, 1]]:
            return F.scatter(out, ids, x), F.sum(out)

    def other() -> None:
        @chain(V=8, M=4, N=16)
        def wrong(out: f32[V, N], ids: i32[M], x: f32[M, N]) -> bf16[V, N]:
            return F.scatter(out, ids, x)

    def kind() -> None:
        @chain(V=8, M=4, N=16)
        def wrong(out: i32[V, N], ids: i32[M], x: f32[M, N]) -> i32[V, N]:
            return F.scatter(out, ids, x)

    refused("found a value that is computed to write to, wanted an operand of rows", computed)
    refused("found ids that are computed, wanted an operand", ids)
    refused(r"found values \[V, N\] and ids \[M\] for rows of \[V, N\]; wanted values \[M, N\]", shape)
    refused("out with its new rows is not returned", lost)
    refused("out is read elsewhere too", read)
    refused(r"the output is declared bf16\[V, N\], and out, in whose memory it is, is f32\[V, N\]", other)
    refused("found values of f32 for an array of i32", kind)


def test_an_operator_of_torch_gives_new_tensors() -> None:
    pytest.importorskip("torch", reason="torch is missing: pip install torch")
    from fusegen import torch as fusegen_torch

    with pytest.raises(RequestError, match="writes to out in its own memory"):
        fusegen_torch.op(plain, "fusegen_tests::scattered")
