"""u32: whole numbers modulo 2^32, as numpy's uint32 has them, and what is refused of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import b8, chain, dims, f32, i32, u8, u32
from fusegen import ops as F
from fusegen.emitting.joined import rendered
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.errors import ArgumentError, NoPlan, SpecError
from fusegen.language.ops import FUNCTIONS
from fusegen.language.torch_source import torch_source
from fusegen.validation import validate

M, N = dims("M N")
Array = np.ndarray[Any, np.dtype[Any]]
WORD = 2**32


@chain(M=24, N=48)
def mixed(x: u32[M, N], y: u32[M, N], seed: u32) -> tuple[u32[M, N], u32[M, N], u32[M, N], b8[M, N]]:
    """Every op that u32 has."""
    hashed = (x * 2654435761 + seed) ^ (y >> 16)
    divided = F.where(x > y, x - y, y % (x | 1)) // 3 + x // y + x % y
    turned = (x << y) + (x >> y) + (x << 7) + x**2
    least = F.minimum(~x, F.maximum(-y, x << (y & 31))) & 4294967294
    return hashed, divided, turned + least, ((x >= y) & (hashed != divided)) | (x < 5) | (y <= x) | (x == y)


@chain(M=24, N=48)
def converted(x: u32[M, N], y: i32[M, N], z: f32[M, N], w: u8[M, N]) -> tuple[
    f32[M, N], i32[M, N], u32[M, N], u32[M, N], b8[M, N], u32[M, N], f32[M, N],
]:  # fmt: skip
    """To and from the other types."""
    bits = F.bitcast(z, u32)
    return (
        x * 0.5, F.cast(x, i32), F.cast(y, u32), F.cast(z, u32) + F.cast(w, u32), F.cast(x, b8), bits ^ x,
        F.bitcast(bits, f32),
    )  # fmt: skip


@chain(M=24, N=48)
def looked_up(table: u32[M, N], ids: i32[M]) -> u32[M, N]:
    """Rows that an index names, 0 where it names none; the halves of each swapped."""
    rows = F.gather(table, ids)
    low, high = F.split(rows, 2)
    return F.concat([high + 1, low])


def numbers(shape: tuple[int, ...], seed: int) -> Array:
    rng = np.random.default_rng(seed)
    made = rng.integers(0, WORD, shape, dtype=np.uint32)
    made[:, :8] = [0, 1, 2, 31, 32, 33, 2**31, WORD - 1]
    return made


def meaning(x: Array, y: Array, seed: int) -> tuple[Array, ...]:
    """Every op by Python's whole numbers, element by element."""

    def of(a: int, b: int) -> tuple[int, ...]:
        shifted = (a << b if b < 32 else 0) + (a >> b) + (a << 7) + a * a
        hashed = ((a * 2654435761 + seed) % WORD) ^ (b >> 16)
        divided = (a - b if a > b else b % (a | 1)) // 3 + (a // b if b else 0) + (a % b if b else 0)
        least = min(WORD - 1 - a, max(-b % WORD, (a << (b & 31)) % WORD)) & 4294967294
        return hashed, divided % WORD, (shifted + least) % WORD

    found = [[of(int(a), int(b)) for a, b in zip(*rows, strict=True)] for rows in zip(x, y, strict=True)]
    hashed, divided, turned = np.moveaxis(np.array(found, np.uint64), -1, 0).astype(np.uint32)
    return hashed, divided, turned, ((x >= y) & (hashed != divided)) | (x < 5) | (y <= x) | (x == y)


try:
    compiler()
    HERE = True
except EmulatorUnavailable:
    HERE = False
emulated = pytest.mark.skipif(not HERE, reason="no emulator")


@emulated
@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("target", ["cuda:h200", "hip:mi300x"])
def test_every_op_is_that_of_whole_numbers_modulo_2_32(target: str) -> None:
    kernel = fusegen.compile(mixed, target=target, on="emulator", validate=False)
    report = validate(kernel, quick=True)
    assert report.ok, str(report)
    x, y = numbers((9, 48), 0), numbers((9, 48), 1)
    y[:, 8:20] = np.arange(12) * 3
    y[::2] = y[::2, ::-1]
    for seed in (0, 7, WORD - 1):
        for one, two in zip(kernel(x, y, seed), meaning(x, y, seed), strict=True):
            assert one.dtype == two.dtype
            np.testing.assert_array_equal(one, two)
    for wrong in (-1, WORD, 1.5):
        with pytest.raises(ArgumentError, match="a whole number from 0 to 4294967295"):
            kernel(x, y, wrong)


@emulated
@pytest.mark.usefixtures("emulated_only")
@pytest.mark.parametrize("target", ["cuda:h200", "hip:mi300x"])
def test_conversions(target: str) -> None:
    kernel = fusegen.compile(converted, target=target, on="emulator")
    x, y = numbers((3, 48), 0), numbers((3, 48), 1).view(np.int32)
    z = np.linspace(-3, 6e9, 144, dtype=np.float32).reshape(3, 48)
    z[0, :5] = [np.nan, np.inf, -np.inf, 4294967040.0, 0.99]
    w = np.arange(144, dtype=np.uint8).reshape(3, 48)
    halves, signed, unsigned, whole, mask, bits, back = kernel(x, y, z, w)
    np.testing.assert_allclose(halves, x * 0.5, rtol=2**-23)
    np.testing.assert_array_equal(signed, x.view(np.int32))
    np.testing.assert_array_equal(unsigned, y.view(np.uint32))
    wanted = np.nan_to_num(np.clip(z.astype(np.float64), 0, WORD - 1)).astype(np.uint64) + w
    np.testing.assert_array_equal(whole, (wanted % WORD).astype(np.uint32))
    np.testing.assert_array_equal(mask, x != 0)
    np.testing.assert_array_equal(bits, z.view(np.uint32) ^ x)
    np.testing.assert_array_equal(back, z)


@emulated
@pytest.mark.usefixtures("emulated_only")
def test_rows_that_an_index_names_and_views() -> None:
    program = fusegen.compile(looked_up, target="cuda:h200", on="emulator")
    table, ids = numbers((24, 48), 3), np.array([3, -1, 23, 24] * 6, np.int32)
    rows = np.where(((ids >= 0) & (ids < 24))[:, None], table[np.clip(ids, 0, 23)], np.uint32(0))
    np.testing.assert_array_equal(program(table, ids), np.concatenate([rows[:, 24:] + np.uint32(1), rows[:, :24]], 1))


def test_the_kernel_has_unsigned_numbers_and_no_test_that_always_passes() -> None:
    text = fusegen.render(fusegen.plan(mixed, "cuda:h200")).text
    assert "const unsigned shift_right = y >> 16u;" in text
    assert "unsigned seed" in text
    assert "4294967294u" in text


def test_torch_text_stays_within_32_bits() -> None:
    text = torch_source(mixed.graph)
    assert "x = x.to(torch.int64)" in text
    assert "& 0xFFFFFFFF" in text
    assert ".to(torch.uint32)" in text


# ---------------------------------------------------------------- what is refused


def refused(body: Callable[..., Any], *, output: Any = None) -> str:
    def spec(x, y, z):  # type: ignore[no-untyped-def]
        return body(x, y, z)

    spec.__annotations__ = {"x": u32[M, N], "y": i32[M, N], "z": f32[M, N], "return": output or u32[M, N]}
    with pytest.raises(SpecError) as found:
        chain(M=24, N=48)(spec)
    return str(found.value)


@pytest.mark.parametrize(("body", "said"), [
    (lambda x, y, z: x + y, "found u32 and i32; signed and unsigned do not mix"),
    (lambda x, y, z: y < x, "found i32 and u32; signed and unsigned do not mix"),
    (lambda x, y, z: x << y, "signed and unsigned do not mix"),
    (lambda x, y, z: F.where(x > 0, x, y), "signed and unsigned do not mix"),
    (lambda x, y, z: x & y, "signed and unsigned do not mix"),
    (lambda x, y, z: x + -1, "the literal -1 is beyond u32, which holds 0 to 4294967295"),
    (lambda x, y, z: x % 2**32, "the literal 4294967296 is beyond u32"),
    (lambda x, y, z: x & (x > 0), "wanted masks (b8) alone or whole numbers"),
    (lambda x, y, z: x // z, "wanted whole numbers"),
    (lambda x, y, z: F.sum(x), "found u32, which has + - * // % & | ^ ~ << >>, comparisons"),
    (lambda x, y, z: abs(x), "found u32, which has"),
    (lambda x, y, z: F.relu(x), "found u32, which has"),
    (lambda x, y, z: x * 0.5, "the output is f32, declared is u32"),
    (lambda x, y, z: y, "the output is i32, declared is u32; convert it with F.cast"),
])  # fmt: skip
def test_what_is_not_meant_is_refused_in_a_sentence(body: Callable[..., Any], said: str) -> None:
    assert said in refused(body)


def test_signed_outputs_take_no_unsigned_values() -> None:
    assert "the output is u32, declared is i32" in refused(lambda x, y, z: x + 1, output=i32[M, N])
    assert "the output is u32, declared is u8" in refused(lambda x, y, z: x + 1, output=u8[M, N])


GIVEN: dict[str, tuple[Any, ...]] = {"topk": (4,), "clamp": (0, 1), "leaky_relu": (0.1,), "elu": ()}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_no_function_breaks_on_u32(name: str) -> None:
    """Each takes it, by becoming f32 where that is its way, and is planned; or says in a sentence what it wants."""
    function = getattr(F, name)

    def spec(x, y, z):  # type: ignore[no-untyped-def]
        try:
            made = function(x, *GIVEN.get(name, ()))
        except TypeError:
            made = function(x, x)
        made = made[0] if isinstance(made, tuple) else made
        total = F.sum(F.cast(made, f32)) if made.shape[-1:] != (1,) else F.cast(made, f32)
        return z + y + F.cast(x, f32) + total

    spec.__annotations__ = {"x": u32[M, N], "y": i32[M, N], "z": f32[M, N], "return": f32[M, N]}
    try:
        made = chain(M=24, N=48)(spec)
    except SpecError as error:
        refusal: SpecError | None = error
    else:
        refusal = None
    if refusal is not None:
        assert refusal.where is not None
        assert "is not used" not in str(refusal)
        return
    for target in ("cuda:h200", "hip:mi300x"):
        with suppress(NoPlan):
            found: Any = fusegen.plan(made, target)
            for plan in getattr(found, "launched", (found,)):
                assert rendered(plan).text
