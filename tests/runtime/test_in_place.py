"""Outputs over operands: what a plan claims to do in place gives the same bits so, and what it does not is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegen.planner.model as model
from fusegen import bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import KernelFault
from fusegen.errors import ArgumentError
from fusegen.language.spec import Chain
from fusegen.pipeline import compile
from fusegen.planner import candidates, plan
from fusegen.planner.model import Layout, RowPlan, Source
from fusegen.planner.rows.in_place import Pairs, overwritable
from fusegen.runtime import Kernel, finding
from fusegen.targets import H200, Target
from fusegen.validation import validate
from tests.row_plans import row_plans
from tests.specs import ROWS

pytestmark = pytest.mark.usefixtures("emulated_only")

B, M, N = dims("B M N")
Array = np.ndarray[Any, np.dtype[Any]]


@chain(M=64, N=256)
def add_norm(x: bf16[M, N], residual: bf16[M, N], gain: bf16[N]) -> tuple[bf16[M, N], bf16[M, N]]:
    """What fused_add_rms_norm does in place."""
    h = x + residual
    return F.rmsnorm(h, gain), h


@chain(B=2, M=3, N=64)
def scaled(x: f32[B, M, N], bias: f32[N], y: f32[B, M, N]) -> f32[B, M, N]:
    return F.softmax(x + bias) * y


@chain(M=64, N=256)
def penalty(logits: f32[M, N], mask: f32[M, N], scale: f32) -> f32[M, N]:
    """Flat."""
    return F.where(mask > 0, logits * scale, logits)


@chain(M=8, N=256)
def read_twice(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N]]:
    """The first output is written while x is still wanted, unless it is kept."""
    return x * 2.0, x - F.mean(x)


def alone(made: model.Plan) -> Kernel:
    """A kernel of that plan, and of no other."""

    def variant(layout: Layout) -> tuple[Source, None]:
        raise AssertionError(f"{layout} asks for another plan than {made.configuration}")

    return Kernel(render(made), None, finding.find(made.target, "emulator"), variant)


def operands_of(made: Chain, rows: int, rng: np.random.Generator) -> list[Any]:
    graph = made.graph.at(**{str(s): rows for s in made.graph.shape[:-1] if str(s) in made.graph.sizes})
    found: list[Any] = []
    for tensor in graph.inputs:
        shape = tuple(graph.sizes.get(str(size), size) for size in tensor.shape)
        if not shape:
            found.append(3 if tensor.dtype is i32 else 0.5)
            continue
        found.append(rng.normal(size=shape).astype(np.float32).astype(tensor.dtype.numpy))
    return found


def outcome(result: Any) -> tuple[Array, ...]:
    return result if isinstance(result, tuple) else (result,)


def bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def in_place(kernel: Kernel, operands: Sequence[Any], pairs: Pairs, fresh: Sequence[Array]) -> tuple[Array, ...]:
    """The results where the outputs of `pairs` are written over copies of their operands."""
    copies = [a.copy() if isinstance(a, np.ndarray) else a for a in operands]
    by_name = {t.name: copy for t, copy in zip(kernel.operands, copies, strict=True)}
    over = dict(pairs)
    outs = tuple(
        by_name[over[t.name]] if t.name in over else np.empty_like(array)
        for t, array in zip(kernel.outputs, fresh, strict=True)
    )
    kernel(*copies, out=outs if len(outs) > 1 else outs[0])
    return outs


def matchings(pairs: Pairs) -> Iterator[Pairs]:
    """Each pair alone, and as many as go together."""
    for pair in sorted(pairs):
        yield frozenset({pair})
    together: dict[str, str] = {}
    for output, operand in sorted(pairs):
        if output not in together and operand not in together.values():
            together[output] = operand
    if len(together) > 1:
        yield frozenset(together.items())


# ---------------------------------------------------------------- every plan that claims it


CHAINS = {**ROWS, **{c.name: c for c in (add_norm, scaled, penalty, read_twice)}}
LENGTHS = (96, 77, 3000)


def groups(made: Chain, target: Target, layout: Layout) -> list[RowPlan]:
    """A plan of each kind: template, staging, what is kept, how wide, shared by how many."""
    kinds: dict[object, RowPlan] = {}
    for one in candidates(made.graph, target, layout).plans:
        assert isinstance(one, RowPlan)
        tile = one.tile
        kind = (one.template, one.staging, one.keeps, tile.vector, tile.cluster > 1, tile.rows_per_block > 1,
                tile.per_thread > 1, tile.again > 0, one.flat)  # fmt: skip
        kinds.setdefault(kind, one)
    return list(kinds.values())


@pytest.mark.pairwise("name", "cols", "target")
@pytest.mark.parametrize("cols", LENGTHS)
@pytest.mark.parametrize("name", CHAINS)
def test_every_kind_of_plan_gives_the_same_bits_in_place(
    name: str, cols: int, target: Target, request: pytest.FixtureRequest
) -> None:
    """In the checking emulator, which reports every byte that one thread writes and another one reads. Of the kinds at
    one length every third one, of those at another the others; with --all, each."""
    found = CHAINS[name]
    last = str(found.graph.shape[-1])
    if found.graph.selections or last not in found.graph.sizes:
        assert plan(found.graph, target).in_place == frozenset()
        return
    found = found.at(**{last: cols})
    rng = np.random.default_rng(1)
    operands = operands_of(found, 5, rng)
    claimed = frozenset(pair for one in row_plans(found.graph, target) for pair in one.in_place)
    for pairs in matchings(claimed):
        kinds = groups(found, target, Layout(in_place=pairs))[:: 1 if len(claimed) < 3 else 3]
        for one in kinds if request.config.getoption("--all") else kinds[LENGTHS.index(cols) :: 3] or kinds[:1]:
            assert pairs <= one.in_place
            kernel = alone(one)
            fresh = outcome(kernel(*operands))
            for got, wanted in zip(in_place(kernel, operands, pairs, fresh), fresh, strict=True):
                np.testing.assert_array_equal(bits(got), bits(wanted), f"{one.configuration} {sorted(pairs)}")


def test_what_specs_claim() -> None:
    def claims(made: Chain) -> list[tuple[str, str]]:
        return sorted(plan(made.graph, H200).in_place)

    assert claims(add_norm) == [(o, i) for o in ("h", "rmsnorm") for i in ("residual", "x")]
    assert claims(scaled) == [("out", "x"), ("out", "y")]
    assert claims(penalty) == [("out", "logits"), ("out", "mask")]
    assert claims(ROWS["topk"]) == []


def test_only_an_operand_of_the_whole_shape_and_the_same_type_is_overwritten() -> None:
    @chain(B=2, M=3, N=64)
    def spec(x: f16[B, M, N], y: f32[B, M, N], z: f32[M, N], v: f32[B, M, 1]) -> tuple[f32[B, M, N], f32[B, M, 1]]:
        return x + y + z + v, F.sum(x) + v

    assert plan(spec.graph, H200).in_place == {("out0", "y")} or plan(spec.graph, H200).in_place == {("add", "y")}


# ---------------------------------------------------------------- calls


KERNELS: dict[tuple[str, int, str], Kernel] = {}


def compiled(made: Chain, target: Target) -> Kernel:
    """Once for each chain, row length and target."""
    key = (made.name, made.graph.cols, target.name)
    if key not in KERNELS:
        KERNELS[key] = compile(made, target, on="emulator", validate=False)
    return KERNELS[key]


def test_fused_add_rms_norm(target: Target) -> None:
    kernel, rng = compiled(add_norm, target), np.random.default_rng(2)
    x, residual, gain = operands_of(add_norm, 7, rng)
    y, h = kernel(x, residual, gain)
    given = kernel(x, residual, gain, out=(x, residual))
    assert given[0] is x
    np.testing.assert_array_equal(bits(x), bits(y))
    np.testing.assert_array_equal(bits(residual), bits(h))
    (layout,) = (layout for layout in kernel.variants if layout.in_place)
    text = kernel.variants[layout].source.text
    assert "* x_ptr" in text
    assert "* __restrict__ gain_ptr" in text
    assert "* __restrict__ x_ptr" in kernel.source.text


def test_rows_that_no_vector_divides_are_refused(target: Target) -> None:
    """They go by aligned blocks, which lie across columns that other threads read; by elements they had other bits."""

    @chain(M=8, N=4097)
    def spec(x: f32[M, N]) -> tuple[f32[M, N], f16[M, N]]:
        return x - F.var(x), F.cast(x * 2.0, f16)

    kernel = compile(spec, target, on="emulator", validate=False)
    x = np.random.default_rng(3).normal(size=(5, 4097)).astype(np.float32)
    wanted = kernel(x)
    before = x.copy()
    with pytest.raises(ArgumentError, match="the output out0 shares memory with the input x"):
        kernel(x, out=(x, np.empty_like(wanted[1])))
    np.testing.assert_array_equal(x, before)


def test_one_operand_twice(target: Target) -> None:
    kernel = compiled(penalty, target)
    x = np.random.default_rng(3).normal(size=(9, 256)).astype(np.float32)
    wanted = kernel(x, x, 0.5)
    kernel(x, x, 0.5, out=x)
    np.testing.assert_array_equal(x, wanted)


def test_what_is_not_the_operand_itself_is_refused(target: Target) -> None:
    kernel, rng = compiled(add_norm, target), np.random.default_rng(4)
    room, residual, gain = (operands_of(add_norm, rows, rng)[part] for rows, part in ((12, 0), (11, 1), (11, 2)))
    fresh = np.empty_like(residual)
    with pytest.raises(ArgumentError, match=r"rmsnorm shares memory with the input x\n.*may be x itself"):
        kernel(room[:11], residual, gain, out=(room[1:], fresh))
    with pytest.raises(ArgumentError, match="the output h shares memory with the output rmsnorm"):
        kernel(room[:11], residual, gain, out=(residual, residual))
    narrow = np.zeros((11, 256), np.float32)
    with pytest.raises(ArgumentError, match="holds f32"):
        kernel(room[:11], residual, gain, out=(narrow, fresh))


def test_a_chain_that_may_not_says_over_what_it_may(target: Target) -> None:
    @chain(M=8, N=64)
    def spec(x: f32[M, N], v: f32[M, 1]) -> tuple[f32[M, N], f32[M, 1]]:
        return x * v, F.sum(x * v)

    kernel = compile(spec, target, on="emulator", validate=False)
    x, v = np.ones((5, 64), np.float32), np.ones((5, 1), np.float32)
    with pytest.raises(
        ArgumentError, match=r"may not have read all of v where it writes .*; it may write .* over no oper"
    ):
        kernel(x, v, out=(np.empty_like(x), v))
    assert kernel(x, v, out=(x, np.empty_like(v)))[0] is x


def test_products_and_selections_write_over_nothing() -> None:
    from tests.specs import PRODUCTS

    for found in (*PRODUCTS.values(), ROWS["topk"]):
        assert plan(found.graph, H200).in_place == frozenset()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["add_norm", "scaled", "penalty"]), st.sampled_from([64, 77, 256]), st.integers(1, 9),
    st.integers(0, 3), st.integers(0, 9), st.booleans(), st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_layout(name: str, cols: int, rows: int, offset: int, padding: int, swap: bool, random: Any) -> None:
    """Padded, misaligned and swapped rows: the bits of a call of its own memory."""
    made = CHAINS[name]
    kernel = compiled(made.at(N=cols), H200)
    operands = operands_of(made.at(N=cols), rows, np.random.default_rng(rows))

    def laid(array: Array) -> Array:
        order = (1, 0, 2) if swap and array.ndim == 3 else tuple(range(array.ndim))
        shape = [array.shape[axis] for axis in order]
        room = np.zeros((int(np.prod(shape[:-1])) * (shape[-1] + padding) + offset), array.dtype)
        view = room[offset:].reshape(*shape[:-1], shape[-1] + padding)[..., : shape[-1]].transpose(np.argsort(order))
        view[...] = array
        return view

    wanted = outcome(kernel(*operands))
    arrays = [laid(a) if isinstance(a, np.ndarray) and a.ndim > 1 else a for a in operands]
    whole = [t.name for t in kernel.operands if len(t.shape) == len(made.graph.shape)]
    chosen = dict(zip((t.name for t in kernel.outputs), random.sample(whole, len(kernel.outputs)), strict=True))
    by_name = {t.name: a for t, a in zip(kernel.operands, arrays, strict=True)}
    outs = tuple(by_name[operand] for operand in chosen.values())
    kernel(*arrays, out=outs if len(outs) > 1 else outs[0])
    for got, expected in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(bits(got), bits(expected))


# ---------------------------------------------------------------- repeated calls


def numpy_signature(arrays: Sequence[Array], widest: int) -> tuple[Any, tuple[int, ...]]:
    """What `fast_signature` is of torch tensors, of numpy arrays."""
    pointers = tuple(a.ctypes.data for a in arrays)
    traits = [(a.shape, a.strides, a.dtype, at % widest) for a, at in zip(arrays, pointers, strict=True)]
    return tuple(traits), pointers


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_repeated_call_in_place_has_a_record_of_its_own(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no check from the ground up, and is not taken for one with memory of its own."""
    kernel = compile(scaled.at(N=68), H200, on="emulator", validate=False)
    if library == "torch":
        torch = pytest.importorskip("torch", reason="torch is missing: pip install torch")
        given: Any = torch.from_numpy
    else:
        monkeypatch.setattr("fusegen.runtime.kernel.fast_signature", numpy_signature)
        given = np.asarray
    firsts: list[Kernel] = []
    call_first = Kernel.call_first

    def counted(self: Kernel, *rest: Any) -> Any:
        firsts.append(self)
        return call_first(self, *rest)

    monkeypatch.setattr(Kernel, "call_first", counted)
    x, bias, y = (a.reshape(a.shape) for a in operands_of(scaled.at(N=68), 4, np.random.default_rng(6)))
    wanted = np.asarray(kernel(given(x), given(bias), given(y)))

    def call(over: str) -> Array:
        arrays: dict[str, Array] = {"x": x.copy(), "y": y.copy(), "": np.empty_like(x)}
        out = given(arrays[over])
        x_, y_ = (out if over == name else given(arrays[name]) for name in ("x", "y"))
        assert kernel(x_, given(bias), y_, out=out) is out
        return arrays[over]

    for over in ("", "x", "y", "", "x", "y", "x", ""):
        np.testing.assert_array_equal(bits(call(over)), bits(wanted), over)
    assert len(firsts) == 4  # fresh, out= of its own, over x, over y
    room = np.zeros((5, *x.shape[1:]), np.float32)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="shares memory with the input x"):
            kernel(given(room[:4]), given(bias), given(y), out=given(room[1:]))


def test_a_prepared_call_in_place(target: Target) -> None:
    """It goes on from what it wrote, as often as it is launched."""
    kernel = compiled(penalty, target)
    x, mask, _ = operands_of(penalty, 3, np.random.default_rng(7))
    prepared = kernel.prepare(x, mask, 0.5, out=x)
    wanted = x
    for _ in range(2):
        wanted = np.where(mask > 0, wanted * np.float32(0.5), wanted)
        prepared()
        np.testing.assert_array_equal(x, wanted)


def test_raw_memory_in_place(target: Target) -> None:
    kernel = compiled(penalty, target)
    x, mask, _ = operands_of(penalty, 3, np.random.default_rng(8))
    memory = kernel.device.empty(x.nbytes)
    memory.write(x.view(np.uint8).reshape(-1))
    view = memory.view(f32, x.shape)
    for _ in range(2):
        kernel(view, mask, 0.5, out=view)
    np.testing.assert_array_equal(view.numpy(), np.where(mask > 0, x * np.float32(0.25), x))


def test_a_program_writes_over_what_only_an_earlier_kernel_reads(target: Target) -> None:
    @chain(M=8, N=64)
    def spec(x: f16[M, N], w: f16[N, N], v: f16[N, N]) -> f16[M, N]:
        return F.cast(F.relu(x @ w), f16) @ v

    @chain(M=8, N=64)
    def behind(x: f16[M, N], w: f16[N, N], v: f16[N, N]) -> f16[M, N]:
        return F.cast(F.relu(x @ w), f16) @ v + x

    program = compile(spec, target, on="emulator", validate=False)
    assert program.in_place == {("out", "x")}
    x, w, v = operands_of(spec, 8, np.random.default_rng(9))
    wanted = program(x, w, v)
    assert program(x, w, v, out=x) is x
    np.testing.assert_array_equal(x, wanted)
    program = compile(behind, target, on="emulator", validate=False)
    assert program.in_place == frozenset()
    with pytest.raises(ArgumentError, match=r"shares memory with the input x\n.*it may write that over no operand"):
        program(x, w, v, out=x)


# ---------------------------------------------------------------- validation


def test_validation_writes_over_every_operand_that_the_plan_names(target: Target) -> None:
    kernel = compile(add_norm, target, on="emulator", validate=False)
    report = validate(kernel, cases=["in place"])
    assert report.ok
    said = " ".join(case.reason for case in report.cases)
    for pair in kernel.plan.in_place:
        assert "{} over {}".format(*pair) in said
    assert "odd stride" in said


def test_validation_finds_a_wrong_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads x again behind the pass that writes over it."""
    made = read_twice.at(N=3000)
    one = next(p for p in row_plans(made.graph, H200) if p.staging == "stream")
    pairs = frozenset({(read_twice.graph.outputs[0].name, "x")})
    assert not pairs <= one.in_place
    monkeypatch.setattr(model, "overwritable", lambda *_: pairs)

    def variant(layout: Layout) -> tuple[Source, None]:
        plans = candidates(made.graph, H200, layout).plans
        return render(next(p for p in plans if p.configuration == one.configuration)), None

    kernel = Kernel(render(one), None, finding.find(H200, "emulator"), variant)
    report = validate(kernel, cases=["in place"])
    assert report.cases
    assert not any(case.ok for case in report.cases if "odd" not in case.reason)


# ---------------------------------------------------------------- wrong claims are caught


def spoiled(one: RowPlan, pairs: Pairs, made: Chain) -> bool:
    """Does a run in place of a plan that should not claim `pairs` show it: by a fault, or by other bits?"""
    kernel, operands = alone(one), operands_of(made, 5, np.random.default_rng(5))
    fresh = outcome(kernel(*operands))
    try:
        found = in_place(kernel, operands, pairs, fresh)
    except KernelFault:
        return True
    return any((bits(got) != bits(wanted)).any() for got, wanted in zip(found, fresh, strict=True))


def test_a_claim_on_what_is_read_again_is_caught(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass writes 2 x over x, and the second one reads x again."""
    pairs = frozenset({(read_twice.graph.outputs[0].name, "x")})
    wrong = [p for p in row_plans(read_twice.at(N=3000).graph, target) if p.staging == "stream"][:3]
    assert wrong
    assert not any(pairs <= one.in_place for one in wrong)
    monkeypatch.setattr(model, "overwritable", lambda *_: pairs)
    for one in candidates(read_twice.at(N=3000).graph, target, Layout(in_place=pairs)).plans:
        if isinstance(one, RowPlan) and one.configuration in {other.configuration for other in wrong}:
            assert spoiled(one, pairs, read_twice.at(N=3000)), one.configuration


def test_a_claim_on_columns_of_others_is_caught(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors that lie across aligned blocks are read beside what other threads write."""
    made = add_norm.at(N=515)
    pairs = frozenset({("rmsnorm", "x")})
    monkeypatch.setattr(model, "by_own_columns", lambda pairs, *_: pairs)
    found = [p for p in candidates(made.graph, target, Layout(in_place=pairs)).plans if p.misaligned_rows][:4]
    assert found
    assert any(spoiled(one, pairs, made) for one in found if isinstance(one, RowPlan))


def test_a_row_that_others_take_once_more_is_caught(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads without a row read the last one's, which its own threads overwrite."""
    pairs = frozenset({("out", "x")})
    made = scaled.at(N=16)
    found = [p for p in candidates(made.graph, target, Layout(in_place=pairs)).plans if p.rows_per_block > 3][:3]
    assert found
    monkeypatch.setattr(RowPlan, "stands_in", property(lambda self: self.lacks_rows))
    for one in found:
        assert isinstance(one, RowPlan)
        assert spoiled(one, pairs, made), one.configuration


def test_order_of_passes_alone_decides() -> None:
    one = plan(read_twice.at(N=3000).graph, H200)
    assert isinstance(one, RowPlan)
    first, *_ = one.passes
    reading = replace(one.passes[-1], loads=first.loads, stores=())
    again = (*one.passes, reading)
    assert overwritable(one.accesses, again, len(one.row_dims), True) == frozenset()
