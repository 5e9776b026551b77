"""The launcher in C against the one in Python: the same numbers, the same results, the same refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.errors import ArgumentError
from fusegen.pipeline import compile
from tests.exports import Library, build

M, N = dims("M N")
Array = np.ndarray[Any, np.dtype[Any]]


@chain(M=64, N=96)
def scaled(x: f32[M, N], gain: f32[N], factor: f32) -> f32[M, N]:
    """rmsnorm(x) * gain * factor."""
    return F.rmsnorm(x, gain) * factor


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    made = compile(scaled, "cuda:h200", on="emulator", validate=False)
    return build(made, tmp_path_factory.mktemp("scaled"))


def wanted(x: Array, gain: Array, factor: float) -> Array:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gain * factor)


def test_a_call(library: Library) -> None:
    rng = np.random.default_rng(0)
    x, gain = rng.standard_normal((5, 96), np.float32), rng.standard_normal(96, np.float32)
    out = np.zeros_like(x)
    assert library.call([(x, f32), (gain, f32), 2.5, (out, f32)]) == 0, library.message
    assert library.launched == ["sm_90a scaled"]
    np.testing.assert_allclose(out, wanted(x, gain, 2.5), rtol=1e-5, atol=1e-5)


def drawn(rows: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(rows)
    x, gain = rng.standard_normal((rows, 96), np.float32), rng.standard_normal(96, np.float32)
    return x, gain, np.full_like(x, np.nan)


ARRANGED: dict[str, Callable[[Array], Array]] = {
    "as planned": lambda x: x,
    "padded rows": lambda x: placed(x, np.zeros((len(x), 128), np.float32)[:, :96]),
    "padded by one": lambda x: placed(x, np.zeros((len(x), 97), np.float32)[:, :96]),
    "from the second element on": lambda x: placed(x, np.zeros(x.size + 1, np.float32)[1:].reshape(x.shape)),
    "backwards": lambda x: placed(x, np.zeros(x.shape, np.float32)[::-1]),
}


def placed(x: Array, there: Array) -> Array:
    there[...] = x
    return there


@pytest.mark.parametrize("rows", [0, 1, 7, 130])
@pytest.mark.parametrize("name", ARRANGED)
def test_layouts(library: Library, name: str, rows: int) -> None:
    x, gain, out = drawn(rows)
    assert library.call([(ARRANGED[name](x), f32), (gain, f32), 0.5, (ARRANGED[name](out), f32)]) == 0, library.message
    assert len(library.launched) == (rows > 0)
    out = ARRANGED[name](out)
    assert library.call([(ARRANGED[name](x), f32), (gain, f32), 0.5, (out, f32)]) == 0
    np.testing.assert_allclose(out, wanted(x, gain, 0.5), rtol=1e-5, atol=1e-5)


def test_the_fastest_variant_that_fits(library: Library) -> None:
    x, gain, out = drawn(5)
    found = {}
    for name, arranged in ARRANGED.items():
        assert library.call([(arranged(x), f32), (gain, f32), 1.0, (out, f32)]) == 0
        found[name] = library.launched[0].removeprefix("sm_90a scaled")
    assert found["as planned"] == found["padded rows"] == found["backwards"] == ""
    assert found["padded by one"] == found["from the second element on"] == "_any_alignment"


def test_in_place(library: Library) -> None:
    x, gain, _ = drawn(5)
    expected = wanted(x, gain, 1.0)
    assert library.call([(x, f32), (gain, f32), 1.0, (x, f32)]) == 0
    assert library.launched == ["sm_90a scaled_in_place"]
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)


def test_refusals(library: Library) -> None:
    x, gain, out = drawn(5)
    room = np.zeros((8, 96), np.float32)

    def refused(*arrays: object) -> str:
        assert library.call(list(arrays)) == 1, "it was launched"  # type: ignore[arg-type]
        assert not library.launched
        return library.message

    usual = (gain, f32), 1.0, (out, f32)
    assert "x has 1 axes, and the chain takes x: f32[M, N]" in refused((x[0], f32), *usual)
    assert "x holds elements of type 2" in refused((x, bf16), *usual)
    assert "out on axis 0 has 5, and M is 4 already" in refused((x[:4], f32), *usual)
    assert "compiled for N=96, and these arrays have 95" in refused(
        (x[:, :95], f32), (gain[:95], f32), 1.0, (out[:, :95], f32)
    )
    assert "x has elements along a row that are not next to each other" in refused(
        (np.zeros((5, 192), np.float32)[:, ::2], f32), *usual
    )
    assert "the output out shares memory with the input x" in refused(
        (room[:5], f32), (gain, f32), 1.0, (room[1:6], f32)
    )
    assert "out is an output and its array overlaps itself" in refused(
        (x, f32), (gain, f32), 1.0, (np.broadcast_to(out[0], out.shape), f32)
    )


def test_another_gpu(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    x, gain, out = drawn(5)
    monkeypatch.setattr(library, "capability", (10, 0))
    assert library.call([(x, f32), (gain, f32), 1.0, (out, f32)]) == 2
    assert "nothing here was compiled for this GPU, of compute capability 10.0" in library.message


def test_no_context(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    x, gain, out = drawn(5)
    monkeypatch.setattr(library, "has_context", False)
    assert library.call([(x, f32), (gain, f32), 1.0, (out, f32)]) == 2
    assert "this thread has no current CUDA context" in library.message


Axes = tuple[int, int, int, bool]
axes = st.tuples(st.integers(0, 4), st.sampled_from([96, 96, 96, 97, 100, 128]), st.integers(0, 3), st.booleans())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(x=axes, out=axes, over=st.booleans())
def test_the_same_verdict_as_from_python(library: Library, x: Axes, out: Axes, over: bool) -> None:
    """Whatever the arrays are: what Python's call takes is taken and comes to the same bits, all else is refused."""
    room = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    gain = np.linspace(0.5, 2.0, 96, dtype=np.float32)

    def calls(memory: Array) -> tuple[Array, Array]:
        whole = memory if over else memory[:2048]
        return lain(whole, x), lain(memory if over else memory[2048:], out)

    mine, theirs = room.copy(), room.copy()
    read, written = calls(theirs)
    refused = raised(library.made, read, gain, 1.5, out=written)
    read, written = calls(mine)
    status = library.call([(read, f32), (gain, f32), 1.5, (written, f32)])
    assert bool(status) == bool(refused), refused or library.message
    np.testing.assert_array_equal(mine, room if status else theirs)


def raised(function: Any, *words: Any, **named: Any) -> str:
    try:
        function(*words, **named)
    except ArgumentError as error:
        return str(error)
    return ""


def lain(memory: Array, axes: Axes) -> Array:
    """Rows of 96, so many elements apart, from an element on, backwards or not."""
    rows, step, start, backwards = axes
    found = np.lib.stride_tricks.as_strided(memory[start:], (rows, 96), (4 * step, 4))
    return found[::-1] if backwards else found
