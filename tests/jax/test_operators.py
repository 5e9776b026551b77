"""Chains as operators of JAX: numbers, shapes, gradients, batches, and what is refused. On the CPU, in the emulator."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusegen import b8, bf16, chain, dims, f8e4m3, f16, f32, i32
from fusegen import ops as F
from fusegen.errors import ArgumentError, KernelError, MissingError, RequestError
from fusegen.language.spec import Chain
from fusegen.runtime import called
from tests.tools import needs_compiler, untyped

jax: Any = pytest.importorskip("jax", reason="jax is missing: pip install 'fusegen[jax]'")
from fusegen.jax import emulated, handlers, native, op  # noqa: E402

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated_only")]

numpy: Any = jax.numpy
M, N, V, B = dims("M N V B")
ROOT = Path(__file__).resolve().parents[2]


@chain(M=16, N=32)
def rms(x: f32[M, N], gain: f32[N], eps: f32) -> f32[M, N]:
    """x over its root mean square."""
    return x * F.rsqrt(F.mean(x * x) + eps) * gain


@chain(M=16, N=32)
def rms_backward(x: f32[M, N], gain: f32[N], eps: f32, dout: f32[M, N]) -> tuple[f32[M, N], f32[N]]:
    """Both gradients."""
    rrms = F.rsqrt(F.mean(x * x) + eps)
    normalized, scaled = x * rrms, dout * gain
    dx = rrms * (scaled - normalized * F.mean(scaled * normalized))
    dgain = F.sum(dout * normalized, over=M)[0]
    return dx, dgain


@chain(M=16, N=32)
def halves(x: f32[M, 2 * N], shift: i32) -> tuple[f32[M, N], i32[M, 1]]:
    """A computed size, two results, and an integer."""
    low, high = F.split(x, 2)
    return low * high, F.argmax(low + high) + shift


@chain(M=16, N=32, V=24)
def embedded(ids: i32[M, 1], table: f32[V, N], x: f32[M, N]) -> f32[M, N]:
    """Rows of a table that indices name, scaled."""
    return F.gather(table, ids) * x


@chain(M=16, N=32, V=24)
def embedded_backward(ids: i32[M, 1], table: f32[V, N], dout: f32[M, N]) -> f32[M, N]:
    """Of x alone."""
    return F.gather(table, ids) * dout


@pytest.fixture(scope="module")
def normed() -> Any:
    return op(rms, rms_backward)


def by_jax(x: Any, gain: Any, eps: float = 1e-5) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def some(*shape: int, seed: int = 0) -> Any:
    return numpy.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)


def close(found: Any, wanted: Any, rtol: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), found, wanted)


# ---------------------------------------------------------------- numbers


def test_an_operator_computes_what_its_chain_does_for_any_row_length(normed: Any) -> None:
    jitted = jax.jit(normed, static_argnames="eps")
    for rows, cols in (5, 32), (1, 32), (4, 48), (5, 32), (0, 32):
        x, gain = some(rows, cols), some(cols)
        close(normed(x, gain, 1e-5), by_jax(x, gain))
        close(jitted(x, gain=gain, eps=1e-5), by_jax(x, gain))


def test_it_is_part_of_what_xla_compiles(normed: Any) -> None:
    x, gain = some(6, 32), some(32)

    def chained(x: Any) -> Any:
        doubled, _ = jax.lax.scan(lambda x, _: (normed(2 * x, gain, 1e-5), None), x, length=3)
        return jax.lax.cond(x[0, 0] > 0, lambda x: normed(x, gain, 1e-5) + 1, lambda x: x, doubled)

    def wanted(x: Any) -> Any:
        for _ in range(3):
            x = by_jax(2 * x, gain)
        return x

    several = jax.jit(chained)
    close(several(abs(x)), by_jax(wanted(abs(x)), gain) + 1)
    close(several(-abs(x)), wanted(-abs(x)))
    with jax.disable_jit():
        close(normed(x, gain, 1e-5), by_jax(x, gain))


def test_numbers_are_told_apart_by_their_bits() -> None:
    @chain(M=16, N=32)
    def copied(x: f32[M, N], sign: f32, flips: i32) -> f32[M, N]:
        """The number, in every row."""
        return F.where(F.cast(flips, f32) > 0, sign, x)

    copy, x = op(copied), some(3, 32)
    for number in (0.0, -0.0, 3.5, float("nan")):
        found = np.asarray(copy(x, number, 1))
        assert (found.view(np.int32) == np.float32(number).view(np.int32)).all() or np.isnan(found).all()
    close(copy(x, 1.0, 0), x)


def test_computed_sizes_integers_and_several_results() -> None:
    x = some(3, 64)
    product, columns = jax.jit(lambda x: op(halves)(x, 7))(x)
    low, high = numpy.split(x, 2, -1)
    close(product, low * high)
    assert (columns == (low + high).argmax(-1, keepdims=True) + 7).all()
    assert columns.dtype == np.int32


def test_types_of_ml_dtypes() -> None:
    @chain(M=16, N=32)
    def narrowed(x: bf16[M, N], mask: b8[M, N]) -> tuple[f8e4m3[M, N], b8[M, N]]:
        """Half a byte of types that numpy has not."""
        return F.where(mask, x, 0.0), x > 0

    x, mask = some(5, 32).astype(numpy.bfloat16), some(5, 32, seed=1) > 0
    found, positive = jax.jit(op(narrowed))(x, mask)
    assert found.dtype == numpy.float8_e4m3fn
    assert positive.dtype == bool
    assert (found.astype(np.float32) == numpy.where(mask, x, 0).astype(found.dtype).astype(np.float32)).all()
    assert (positive == (x > 0)).all()


def test_shapes_are_known_without_a_kernel(normed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegen.operators.kernels.compiled", None)
    found = jax.eval_shape(lambda x, gain: normed(x, gain, 1e-5), some(3, 1234), some(1234))
    assert (found.shape, found.dtype) == ((3, 1234), np.float32)


@pytest.mark.parametrize("donated", [False, True], ids=["kept", "donated"])
def test_new_rows_of_an_operand_are_in_its_memory_or_in_that_of_a_copy(donated: bool) -> None:
    @chain(M=16, N=32, V=24)
    def stored(cache: f32[V, N], ids: i32[M, 1], x: f32[M, N]) -> tuple[f32[V, N], f32[M, N]]:
        """New rows, and twice what they are."""
        return F.scatter(cache, ids, x), 2 * x

    cache, ids, x = some(24, 32), numpy.asarray([[3], [23], [-1]], np.int32), some(3, 32, seed=1)
    before, address = np.array(cache), cache.unsafe_buffer_pointer()
    found, doubled = jax.jit(op(stored), donate_argnums=(0,) if donated else ())(cache, ids, x)
    wanted = before.copy()
    wanted[[3, 23]] = x[:2]
    close((found, doubled), (wanted, 2 * x))
    assert (found.unsafe_buffer_pointer() == address) is donated
    assert cache.is_deleted() is donated
    if not donated:
        close(cache, before)


# ---------------------------------------------------------------- gradients


@pytest.fixture(scope="module")
def derived() -> Any:
    return op(rms, "derived")


@pytest.mark.parametrize("made", ["normed", "derived"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_gradients_are_those_of_jax(request: pytest.FixtureRequest, made: str, jit: bool) -> None:
    normed = request.getfixturevalue(made)
    x, gain, weights = some(6, 32), some(32, seed=1), some(6, 32, seed=2)

    def gradients(function: Any, argnums: Any) -> Any:
        found = jax.grad(lambda x, gain: (function(x, gain, 1e-5) * weights).sum(), argnums)
        return (jax.jit(found) if jit else found)(x, gain)

    for argnums in (0, 1, (0, 1)):
        close(gradients(normed, argnums), gradients(by_jax, argnums), rtol=1e-4)


def test_operands_without_a_gradient_have_none() -> None:
    embed = op(embedded, embedded_backward, gradients=("x",))
    ids, table, x = numpy.asarray([[3], [23], [0]], np.int32), some(24, 32), some(3, 32, seed=1)
    close(jax.grad(lambda x: embed(ids, table, x).sum())(x), table[ids[:, 0]])
    with pytest.raises(RequestError, match="gradient of table is asked for, and backward has no output dtable"):
        jax.grad(lambda table: embed(ids, table, x).sum())(table)
    close(jax.grad(lambda x: embed(ids, jax.lax.stop_gradient(2 * x[:1] + table), x).sum())(x).shape, (3, 32))


def test_an_output_that_nothing_was_made_of_has_a_gradient_of_zeros() -> None:
    @chain(M=16, N=32)
    def both(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N]]:
        """Two outputs by name."""
        double = 2 * x
        square = x * x
        return double, square

    @chain(M=16, N=32)
    def both_backward(x: f32[M, N], ddouble: f32[M, N], dsquare: f32[M, N]) -> f32[M, N]:
        """Of both."""
        return 2 * ddouble + 2 * x * dsquare

    x, two = some(3, 32), op(both, both_backward, gradients=("x",))
    close(jax.grad(lambda x: two(x)[0].sum())(x), numpy.full_like(x, 2))
    close(jax.grad(lambda x: two(x)[1].sum())(x), 2 * x)
    close(jax.grad(lambda x: sum(map(numpy.sum, two(x))))(x), 2 * x + 2)


def test_without_a_backward_chain_gradients_are_refused(normed: Any) -> None:
    alone, x, gain = op(rms), some(3, 32), some(32)
    with pytest.raises(RequestError, match=r"rms has no chain of gradients"):
        jax.grad(lambda x: alone(x, gain, 1e-5).sum())(x)
    found = jax.grad(lambda x: (x * alone(jax.lax.stop_gradient(x), gain, 1e-5)).sum())(x)
    close(found, by_jax(x, gain))
    with pytest.raises(RequestError, match="rms has no derivative here"):
        jax.grad(lambda x: jax.grad(lambda x: normed(x, gain, 1e-5).sum())(x).sum())(x)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: normed(x, gain, 1e-5), (x,), (x,))


# ---------------------------------------------------------------- batches


def test_a_batch_is_more_rows(normed: Any) -> None:
    x, gain = some(3, 4, 32), some(32)
    over = jax.vmap(lambda x: normed(x, gain, 1e-5))
    close(over(x), by_jax(x, gain))
    close(jax.jit(jax.vmap(over))(x[None]), by_jax(x, gain)[None])
    close(jax.vmap(lambda x: normed(x, gain, 1e-5), in_axes=1, out_axes=1)(x), by_jax(x, gain))


def test_operands_of_rows_that_have_no_batch_are_repeated() -> None:
    """And views that leave the rows where they are move with them."""
    embed = op(embedded)
    ids, table, x = numpy.asarray([[3], [23]], np.int32), some(24, 32), some(5, 2, 32, seed=1)
    close(jax.vmap(lambda x: embed(ids, table, x))(x), table[ids[:, 0]] * x)
    whole, shift = some(3, 2, 64), 7
    product, columns = jax.vmap(lambda x: op(halves)(x, shift))(whole)
    low, high = numpy.split(whole, 2, -1)
    close(product, low * high)
    assert (columns == (low + high).argmax(-1, keepdims=True) + shift).all()
    scale = some(3, 1)
    close(jax.vmap(lambda x: op(inner)(x, scale))(some(2, 4, 3, 32)), some(2, 4, 3, 32) * scale)


@chain(M=16, N=32)
def summed(x: f32[M, N]) -> f32[M, N]:
    """Rows meet in a sum."""
    return x - F.sum(x, over=M)


@chain(M=16, N=32)
def numbered(x: f32[M, N]) -> f32[M, N]:
    """Rows count."""
    return F.where(F.row_index(x) > F.col_index(x), x, 0.0)


@chain(M=16, N=32)
def drawn(x: f32[M, N]) -> f32[M, N]:
    """Each place has its own random number."""
    return F.dropout(x, 0.5, 1, 0)


@chain(M=16, N=32)
def upside_down(x: f32[M, N]) -> f32[M, N]:
    """The last row first."""
    return F.flip(x, 0)


@chain(M=16, N=32)
def looked_up(ids: i32[M, 1], x: f32[M, N]) -> f32[M, N]:
    """Rows of the operand itself, which indices name."""
    return F.gather(x, ids)


@chain(M=16, N=32, B=4)
def by_groups(x: f16[M, N], w: f16[B, N, N], ends: i32[B]) -> f16[M, N]:
    """Rows of a batch would be of other groups."""
    return F.grouped_matmul(x, w, ends)


@chain(M=16, N=32, B=4)
def inner(x: f32[B, M, N], scale: f32[M, 1]) -> f32[B, M, N]:
    """An axis in front of the rows."""
    return x * scale


@chain(M=32, N=32)
def turned(x: f32[M, N]) -> f32[N, M]:
    """Rows become columns."""
    return F.rearrange(x, "m n -> n m")


@pytest.mark.parametrize(
    ("made", "shapes", "axes", "said"),
    [
        (rms, ((3, 32), (2, 32)), (None, 0), "N is not the first axis of out"),
        (rms_backward, ((2, 3, 32), (32,)), (0, None), "M is not the first axis of dgain"),
        (summed, ((2, 3, 32),), (0,), "sum takes rows together"),
        (numbered, ((2, 3, 32),), (0,), "row_index numbers the rows"),
        (drawn, ((2, 3, 32),), (0,), "dropout numbers the rows"),
        (upside_down, ((2, 3, 32),), (0,), "flip puts rows elsewhere"),
        (looked_up, ((2, 3, 1), (2, 3, 32)), (0, 0), "gather takes rows together"),
        (by_groups, ((2, 3, 32), (4, 32, 32), (4,)), (0, None, None), "grouped_matmul takes rows by groups"),
        (inner, ((4, 3, 32), (2, 3, 1)), (None, 0), "M is not the first axis of out"),
        (turned, ((2, 32, 32),), (0,), "M is not the first axis of out"),
    ],
)
def test_batches_of_chains_that_compute_no_row_by_itself_are_refused(
    made: Chain, shapes: Any, axes: Any, said: str
) -> None:
    numbers = {t.name: 1 for t in made.graph.inputs if not t.shape}
    arrays = [some(*shape) for shape in shapes]
    if made is rms_backward:
        arrays, axes = [*arrays, arrays[0]], (*axes, 0)
    names = [t.name for t in made.graph.inputs if t.shape]
    with pytest.raises(RequestError, match=f"{made.name} is no chain for jax.vmap: .*{said}"):
        jax.vmap(lambda *given: op(made)(**dict(zip(names, given, strict=True)), **numbers), axes)(*arrays)


# ---------------------------------------------------------------- what is refused


def test_what_an_operator_refuses_is_one_sentence(normed: Any) -> None:
    x, gain = some(3, 32), some(32)
    with pytest.raises(ArgumentError, match="gain on axis 0 has 31"):
        normed(x, gain[1:], 1e-5)
    with pytest.raises(ArgumentError, match=r"x holds bf16"):
        normed(x.astype(numpy.bfloat16), gain, 1e-5)
    with pytest.raises(ArgumentError, match=r"x holds complex64"):
        normed(x.astype(numpy.complex64), gain, 1e-5)
    with pytest.raises(ArgumentError, match=r"rms takes x: f32\[M, N\], gain: f32\[N\], eps: f32; found missing.*eps"):
        normed(x, gain)
    with pytest.raises(ArgumentError, match="eps is traced by JAX"):
        jax.jit(normed)(x, gain, 1e-5)
    with pytest.raises(ArgumentError, match=r"declare it eps: f32\[1\]"):
        normed(x, gain, numpy.float32(1e-5))


@chain(M=16, N=32)
def misnamed(x: f32[M, N], gradient: f32[M, N]) -> f32[M, N]:
    """An operand that is nothing the forward chain has."""
    return x * gradient


@chain(M=16, N=32)
def whole(x: f32[M, N], eps: i32) -> f32[M, N]:
    """The number is of another type."""
    return x + F.cast(eps, f32)


@chain(M=16, N=32)
def columnar(x: f32[M, N], eps: f32[N]) -> f32[M, N]:
    """The number is an array."""
    return x + eps


@pytest.mark.parametrize(
    ("forward", "backward", "gradients", "said"),
    [
        (untyped(len), None, (), "takes chains, and 'derived' for backward=; found <built-in"),
        (rms, untyped(len), (), "takes chains, and 'derived' for backward=; found <built-in"),
        (rms, whole, ("x",), "backward takes eps: i32, and eps is f32 there"),
        (rms, columnar, ("x",), r"backward takes eps: f32\[N\], and eps is f32 there"),
        (rms, misnamed, ("x",), "operand gradient is nothing that is at hand there"),
        (rms, rms_backward, ("x",), "gradients names 1 operands, and backward has 2 outputs"),
        (rms, rms_backward, ("x", "eps"), "deps is the gradient of no operand"),
    ],
)
def test_what_can_be_no_operator(forward: Chain, backward: Chain | None, gradients: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        op(forward, backward, gradients=gradients)


@pytest.mark.parametrize(
    "fault", [KernelError("rms.cu:7: race: two threads write here"), KeyboardInterrupt("rms.cu:7: race")]
)
def test_a_fault_of_a_kernel_is_xlas_error(normed: Any, fault: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = jax.jit(lambda x: normed(x, some(32), 1e-5)).lower(some(7, 32))
    key = lowered.as_text().partition('call = "')[2][:32]
    compiled = lowered.compile()

    class Faulty:
        name, operands, arrays = "rms", 2, 3

        def run(self, bases: Any, stream: int) -> None:
            assert all(base % called.WIDEST == 0 for base in bases)
            raise fault

    monkeypatch.setitem(emulated.CALLS, key, untyped(Faulty()))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"rms\.cu:7: race"):
        compiled(some(7, 32)).block_until_ready()
    monkeypatch.delitem(emulated.CALLS, key)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"knows no call {key}"):
        compiled(some(7, 32)).block_until_ready()


def test_gradients_are_in_their_operands_types() -> None:
    @chain(M=16, N=32)
    def gained(x: bf16[M, N], gain: bf16[N]) -> bf16[M, N]:
        """Rows by a gain."""
        return x * gain

    @chain(M=16, N=32)
    def gained_backward(x: bf16[M, N], dout: bf16[M, N]) -> f32[N]:
        """Summed in f32."""
        return F.sum(x * dout, over=M)[0]

    x, gain = some(6, 32).astype(numpy.bfloat16), numpy.ones(32, numpy.bfloat16)
    found = jax.grad(lambda gain: op(gained, gained_backward, gradients=("gain",))(x, gain).sum())(gain)
    assert found.dtype == numpy.bfloat16
    close(found.astype(np.float32), x.astype(np.float32).sum(0), rtol=1e-2)


def in_another_process(function: Any, **environment: str) -> str:
    """What a function of this file returns there."""
    code = f"from {__name__} import {function.__name__}; print({function.__name__}())"
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=found, cwd=ROOT, timeout=120
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def normed_by_key() -> str:
    """What lowering gives, and the first number."""
    x, gain = some(6, 32), some(32)
    lowered = jax.jit(lambda x: op(rms)(x, gain, 1e-5)).lower(x)
    key: str = lowered.as_text().partition('call = "')[2][:32]
    return f"{key} {float(lowered.compile()(x)[0, 0]):.5f}"


def test_calls_have_the_same_key_in_another_process() -> None:
    """So that what JAX's compilation cache keeps is found there."""
    assert in_another_process(normed_by_key) == normed_by_key()


def left_while_it_computes() -> str:
    norm, x, gain = op(rms), some(512, 512), some(512)
    several = jax.jit(lambda x: norm(norm(x, gain, 1e-5), gain, 1e-5) + norm(2 * x, gain, 1e-5))
    several(x).block_until_ready()
    for _ in range(4):  # each some tenth of a second, of which none is waited for
        x = several(x)
    return "left"


def test_a_process_ends_though_xla_has_more_to_compute() -> None:
    assert in_another_process(left_while_it_computes) == "left"


def normed_on_two_devices() -> str:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("d",))
    own, every = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    norm, gain = op(rms, rms_backward), some(32)
    x = jax.device_put(some(6, 32), jax.sharding.NamedSharding(mesh, own))
    close(jax.jit(lambda x: norm(x, gain, 1e-5))(x), by_jax(x, gain))
    each = jax.jit(jax.shard_map(lambda x, gain: norm(x, gain, 1e-5), mesh=mesh, in_specs=(own, every), out_specs=own))
    found = each(x, gain)
    close(found, by_jax(x, gain))
    ours, jaxs = (jax.grad(lambda x, gain, f=f: (f(x, gain) ** 2).sum(), (0, 1))(x, gain) for f in (each, by_jax))
    close(ours, jaxs, rtol=1e-4)
    return f"{len(jax.devices())} devices, {found.sharding.spec}"


def test_each_device_computes_its_own_rows_under_shard_map() -> None:
    flags = "--xla_force_host_platform_device_count=2"
    said = in_another_process(normed_on_two_devices, XLA_FLAGS=flags)
    assert said.startswith("2 devices")
    assert "'d'" in said


@pytest.mark.gpu
def test_on_an_nvidia_gpu(normed: Any) -> None:
    try:
        gpus = jax.devices("cuda")
    except RuntimeError:
        pytest.skip("jax sees no NVIDIA GPU")
    step = jax.jit(jax.grad(lambda x, gain: (normed(x, gain, 1e-5) * x).sum(), (0, 1)))
    wanted = jax.grad(lambda x, gain: (by_jax(x, gain) * x).sum(), (0, 1))
    for gpu in gpus:
        for rows in (33, 4097):
            x, gain = jax.device_put((some(rows, 32), some(32)), gpu)
            for _ in range(3):  # as launches, and from a graph of CUDA's
                close(step(x, gain), wanted(x, gain), rtol=1e-3)


def test_on_a_gpu_the_driver_is_needed(normed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(handlers, "told", handlers.told.__wrapped__)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    monkeypatch.setattr(native, "built", lambda: None)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    traced = jax.jit(lambda x: normed(x, some(32), 1e-5)).trace(some(3, 32))
    with pytest.raises(MissingError, match=r"NVIDIA's driver is missing here, .*libcuda\.so\.1"):
        traced.lower(lowering_platforms=("cuda",))


def test_without_jax_an_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", untyped(None))
    with pytest.raises(MissingError, match=r"pip install 'fusegen\[jax\]'"):
        op(rms)
