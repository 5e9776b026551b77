"""Calling a program: one call for several kernels, its workspace, and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fusegen
from fusegen import Program, bf16, chain, dims, f32
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.errors import ArgumentError
from fusegen.language.reference import reference
from fusegen.language.spec import Chain
from fusegen.planner.model import Plan
from tests.chains_cut import logits_topk, lora, mlp, residual_norm

pytestmark = pytest.mark.usefixtures("emulated_only")

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

M, N = dims("M N")
Array = np.ndarray[Any, np.dtype[Any]]


MADE: dict[str, Program] = {}


def fresh(spec: Chain) -> Program:
    found = fusegen.compile(spec, target="cuda:h200", on="emulator", validate=False)
    assert isinstance(found, Program)
    return found


def made(spec: Chain) -> Program:
    if spec.name not in MADE:
        MADE[spec.name] = fresh(spec)
    return MADE[spec.name]


def operands(spec: Chain, seed: int = 0, **sizes: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    graph = spec.graph
    found: list[Any] = []
    for tensor in graph.inputs:
        shape = [{**graph.sizes, **sizes}[str(size)] for size in tensor.shape]
        found.append((rng.integers(-2, 3, shape)).astype(tensor.dtype.numpy) if shape else 0.5)
    return found


def meant(spec: Chain, given: list[Any]) -> Any:
    return reference(spec.graph)(*given)


def test_a_program_is_called_like_a_kernel() -> None:
    program = made(mlp)
    for rows in (24, 1, 130, 24):  # the last one's record is there
        given = operands(mlp, M=rows)
        out = program(*given)
        assert out.dtype == bf16.numpy
        assert out.shape == (rows, 64)
        wanted = meant(mlp, given)
        assert np.linalg.norm(out.astype(np.float64) - wanted) < 0.01 * np.linalg.norm(wanted)
    assert len(program.records) == 3


def test_results_are_of_the_callers_library() -> None:
    torch = pytest.importorskip("torch", reason="torch is missing: pip install torch")
    given = operands(mlp)
    tensors = [torch.from_numpy(a.astype(np.float32)).bfloat16() for a in given]
    out = made(mlp)(*tensors)
    assert isinstance(out, torch.Tensor)
    assert np.array_equal(out.float().numpy(), made(mlp)(*given).astype(np.float32))
    again = made(mlp)(*tensors)
    assert torch.equal(out, again)


def test_a_call_on_tensors_that_comes_back_takes_a_shortcut(monkeypatch: pytest.MonkeyPatch) -> None:
    """With results of its own, by name, and with `out=`; other tensors are checked from the ground up."""
    torch = pytest.importorskip("torch", reason="torch is missing: pip install torch")
    program = fresh(lora)
    wanted = {scale: program(*operands(lora)[:4], scale) for scale in (0.5, -2.0)}
    x, w, a, b = (torch.from_numpy(a.astype(np.float32)).bfloat16() for a in operands(lora)[:4])
    calls: list[object] = []
    call = Program.call

    def counted(self: Program, /, *given: Any, **more: Any) -> Any:
        calls.append(given)
        return call(self, *given, **more)

    monkeypatch.setattr(Program, "call", counted)
    out = torch.empty(24, 96, dtype=torch.bfloat16)
    for _ in range(3):
        program(x, w, a, b, 0.5)
        program(x, w, a, b, 0.5, out=out)
    seen = len(calls)
    for scale in (0.5, -2.0, 0.5):
        assert np.array_equal(program(x, w, a, b, scale).float().numpy(), wanted[scale].astype(np.float32))
        out.zero_()
        assert program(x.clone(), w, a, b, scale, out=out) is out
        assert np.array_equal(out.float().numpy(), wanted[scale].astype(np.float32))
    assert (len(calls), len(program.shortcuts.made)) == (seen, 2)
    named = program(x, w, b=b, a=a, scale=0.5)
    assert torch.equal(named, out)
    assert len(calls) == seen + 1, "once, to put them in order"
    room = np.empty(program.workspace_bytes(M=24) + 64, np.uint8)
    room = room[-room.ctypes.data % 64 :]
    room[:] = 255
    assert torch.equal(program(x, w, a, b, 0.5, workspace=room), out)
    assert not np.all(room == 255), "it was used"
    assert torch.equal(program(x[:5], w, a, b, 0.5), out[:5])
    with pytest.raises(ArgumentError, match="shares memory with the input x"):
        program(out.view(-1)[: 24 * 64].view(24, 64), w, a, b, 0.5, out=out)
    assert len(calls) == seen + 4


def test_operands_come_by_name_and_results_go_to_out() -> None:
    given = operands(lora)
    wanted = made(lora)(*given)
    x, w, a, b, scale = given
    assert np.array_equal(made(lora)(x, w, b=b, scale=scale, a=a), wanted)
    out = np.zeros_like(wanted)
    assert made(lora)(*given, out=out) is out
    assert np.array_equal(out, wanted)


def test_several_results_come_as_a_tuple() -> None:
    given = operands(logits_topk)
    values, columns = made(logits_topk)(*given)
    wanted, places = meant(logits_topk, given)
    np.testing.assert_array_equal(columns, places)
    np.testing.assert_allclose(values, wanted, rtol=1e-5)


def test_no_rows_are_no_launch() -> None:
    h, normed = made(residual_norm)(*operands(residual_norm, M=0))
    assert h.shape == normed.shape == (0, 96)


def test_strided_rows_get_the_variants_they_need() -> None:
    given = operands(residual_norm)
    wanted = made(residual_norm)(*given)
    wide = np.zeros((24, 97), given[2].dtype)
    wide[:, :96] = given[2]
    got = made(residual_norm)(given[0], given[1], wide[:, :96], given[3])
    for one, two in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one.astype(np.float64), two.astype(np.float64), rtol=0.02)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, g, u, d: (x, g, u), "takes 4 operands"),
        (lambda x, g, u, d: (x, g, u[:50], d), "has 50"),
        (lambda x, g, u, d: (x[:, :32], g[:, :32], u[:, :32], d[:32]), "compiled for K=64"),
        (lambda x, g, u, d: (x.astype(np.float32), g, u, d), "x holds f32, and mlp takes bf16"),
        (lambda x, g, u, d: (x[0], g, u, d), "x has 1 axis"),
    ],
)
def test_wrong_arrays_are_refused_in_the_chains_words(change: Callable[..., Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        made(mlp)(*change(*operands(mlp)))


def test_an_output_apart_from_its_operands() -> None:
    given = operands(residual_norm)
    with pytest.raises(ArgumentError, match="shares memory with the input residual"):
        made(residual_norm)(*given, out=(given[2], np.zeros_like(given[2])))


def test_a_workspace_is_kept_and_grows() -> None:
    """What was outgrown stays as it is: a captured graph may hold its address."""
    program = fresh(mlp)
    small = operands(mlp, M=2)
    program(*small)
    (first,) = program.workspaces.values()
    program(*small)
    assert list(program.workspaces.values()) == [first]
    seen = weakref.ref(first.owner)
    program(*operands(mlp, M=3))
    (second,) = program.workspaces.values()
    assert second.bytes == 2 * first.bytes > program.workspace_bytes(M=3)
    program(*operands(mlp, M=200))
    (third,) = program.workspaces.values()
    assert third.bytes == program.workspace_bytes(M=200) > 2 * second.bytes
    program(*small)
    assert list(program.workspaces.values()) == [third]
    assert program.outgrown == [first, second]
    assert len({first.address, second.address, third.address}) == 3
    del first, second, third, program
    gc.collect()
    assert seen() is None, "they go with the program"


def test_a_workspace_may_be_the_callers() -> None:
    program = fresh(mlp)
    given = operands(mlp)
    wanted = made(mlp)(*given)
    needed = program.workspace_bytes(M=24)
    assert needed == 24 * 96 * 2
    room = np.empty(needed + 64, np.uint8)
    assert np.array_equal(program(*given, workspace=room), wanted)
    assert not program.workspaces
    with pytest.raises(ArgumentError, match="workspace has 64 bytes"):
        program(*given, workspace=np.empty(64, np.uint8))
    with pytest.raises(ArgumentError, match="one writable piece"):
        program(*given, workspace=np.empty((needed, 2), np.uint8)[:, 0])
    raw = np.zeros(needed, np.uint8)
    x = raw[: 24 * 64 * 2].view(bf16.numpy).reshape(24, 64)
    with pytest.raises(ArgumentError, match="shares memory with x"):
        program(x, *given[1:], workspace=raw)


def test_a_prepared_call_runs_again() -> None:
    given = operands(mlp)
    prepared = made(mlp).prepare(*given)
    prepared()
    wanted = prepared.result.copy()
    prepared.result[...] = 0
    prepared()
    assert np.array_equal(prepared.result, wanted)
    assert prepared.plan is made(mlp).plan


def test_a_graph_is_replayed_with_what_operands_hold_then() -> None:
    """In the emulator, which runs it; a kernel's too."""
    program, given = made(lora), operands(lora)
    out = np.zeros((24, 96), bf16.numpy)
    replay = program.graph(*given, out=out)
    assert not out.any(), "nothing runs before a replay"
    for seed in (0, 1):
        for array, new in zip(given[:4], operands(lora, seed)[:4], strict=True):
            array[...] = new
        replay()
        assert np.array_equal(out, program(*given))
    assert replay.result is out
    with pytest.raises(TypeError, match="a prepared call can't be pickled"):
        pickle.dumps(replay)
    with pytest.raises(ArgumentError, match="takes 5 operands"):
        program.graph(*given[:3])

    @chain(M=4, N=8)
    def halved(x: f32[M, N]) -> f32[M, N]:
        return x * 0.5

    x = np.ones((4, 8), np.float32)
    alone = fusegen.compile(halved, "hip:mi300x", on="emulator", validate=False).graph(x)
    for value in (1.0, 3.0):
        x[...] = value
        alone()
        assert np.array_equal(alone.result, x / 2)
    fusegen.compile(halved, "hip:mi300x", on="emulator", validate=False).graph(x[:0])()


def test_copies_and_pickles() -> None:
    program = made(mlp)
    assert copy.copy(program) is program
    assert copy.deepcopy(program) is program
    other = pickle.loads(pickle.dumps(program))
    assert other is not program
    given = operands(mlp)
    assert np.array_equal(other(*given), program(*given))
    assert "2 kernels" in repr(program)


def test_each_kernel_is_there_to_look_at() -> None:
    program = made(mlp)
    assert [source.plan.name for source in program.sources] == ["mlp_h", "mlp_out"]
    plans = [kernel.plan for kernel in program.kernels]
    assert all(isinstance(p, Plan) and p.graph.outputs[0].dtype in (bf16, f32) for p in plans)
