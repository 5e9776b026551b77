"""The torch source of a chain computes what its reference does, and says what a torch user would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f8e4m3, f8e5m2, f16, f32, i4, i8, i32, u8
from fusegen import ops as F
from fusegen.language.graph import Graph, Kind
from fusegen.language.naming import entry_name
from fusegen.language.ops import PRIMITIVES
from fusegen.language.reference import draws, reference, reference_source
from fusegen.language.spec import Chain
from fusegen.language.torch_source import COMPOSITES, DTYPES, TEXTS, match, torch_chain, torch_source
from fusegen.language.types import DType, size_of
from fusegen.measuring.operands import operands
from fusegen.measuring.peers import tensor_over
from fusegen.planner.rewrites import simplify
from fusegen.runtime import finding
from fusegen.targets import H200
from tests import grouped
from tests.chains import random_chain
from tests.language.test_products import ALL as PRODUCTS
from tests.language.test_products import bias_gelu, norm_swiglu, scaled
from tests.language.test_unfusing import OWN, SELECTING, as_tuple, small, values_for
from tests.sizes import sizes_at
from tests.specs import FEW, PROGRAMS
from tests.specs import ROWS as SPECS
from tests.torch_reference import tensor, torch_reference

torch: Any = pytest.importorskip("torch", reason="torch is missing: pip install torch")
M, N = dims("M N")
K, L = dims("K L")


@chain(M=6, N=10, K=7, L=4)
def biased(x: f16[M, K], wq: f16[K, N], wk: f16[K, L], bq: f16[N]) -> tuple[f16[M, N], f16[M, L]]:
    return bq + x @ wq, F.relu(x @ wk)


def check(graph: Graph, rtol: float = 2e-4) -> None:
    values = values_for(graph)
    run = torch_chain(graph)
    got = as_tuple(run.function(*map(tensor, values.values()), *run.constants("cpu")))
    with np.errstate(all="ignore"):
        wanted = as_tuple(reference(graph)(*values.values()))
    for out, one, law in zip(graph.outputs, got, wanted, strict=True):
        assert str(one.dtype).removeprefix("torch.") == str(out.dtype.numpy).replace("bool_", "bool")
        left = one.float().numpy() if one.dtype.is_floating_point else one.numpy()
        step: Any = 1.0 if out.dtype in (i8, u8) else rtol  # a number beside the middle of two codes may become either
        step = np.maximum(0.13 * abs(np.asarray(law, np.float64)), rtol) if out.dtype in (f8e4m3, f8e5m2) else step
        wide = np.broadcast_to(np.asarray(law).astype(np.float64), left.shape)
        off = abs(left.astype(np.float64) - wide) > np.broadcast_to(step, left.shape) + rtol * abs(wide)
        same = (left == wide) | (np.isnan(left.astype(np.float64)) & np.isnan(wide))
        assert not (off & ~same).any(), out.name


def test_every_op_has_its_text() -> None:
    without = {"philox"}  # torch's generator is another one
    assert set(TEXTS) | without == {op.name for op in PRIMITIVES} | {
        "scatter", "transpose", "matmul", "matmul_tf32", "grouped_matmul",
        "add_group_rows", "scale_group_rows", "matmul_over_groups", "group_ends", "slot_order", "slot_places",
    }  # fmt: skip


@pytest.mark.parametrize("found", [*SPECS.values(), *OWN, *SELECTING], ids=lambda c: c.name)
def test_specs_agree_with_their_references(found: Chain) -> None:
    graph = small(found)
    if any(n.op.kind is Kind.REDUCE for n in graph.nodes) and graph.name == "masked_softmax":
        graph = graph.at(N=64)  # long enough that no row is masked whole: there torch's softmax is NaN
    check(graph.with_dtype(f32))


@pytest.mark.parametrize("name", SPECS)
def test_specs_in_their_own_types(name: str) -> None:
    graph = SPECS[name].graph
    if draws(graph):
        pytest.skip("torch draws other random numbers")
    if graph.selection is not None:
        pytest.skip("numbers of 16 bits tie, and torch returns ties in any order")
    check(small(SPECS[name]).at(**sizes_at(graph, 64)), rtol=0.05)


UNLIKE = {"decoder_layer_prefill": 0.2, "mxfp8_quant": 0.51, "fp8_norm_swiglu_quant": 0.04, "moe_routing": 1.0}
"""How far a result may be off, where what torch rounds decides a softmax of large logits, a power of two, a code, or
which expert a token has, and with it all places behind."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_views_programs_and_narrow_types(name: str) -> None:
    """All that bench compares with torch: operands as bench makes them, results within what 16 and 8 bits round."""
    chain = PROGRAMS[name]
    graph = chain.graph.at(**(FEW.get(name) or {dim: min(size, 256) for dim, size in chain.graph.sizes.items()}))
    tensors = [tensor_over(torch, value) for value in operands(finding.find(H200, "emulator"), graph).inputs]
    values = [
        as_numpy(value, t.dtype) for value, t in zip(tensors, graph.inputs, strict=True)
    ]  # before it is written to
    with np.errstate(all="ignore"):
        wanted = as_tuple(reference(graph)(*values))
    run = torch_chain(graph)
    got = as_tuple(run.function(*tensors, *run.constants("cpu")))
    for out, one, law in zip(graph.outputs, got, wanted, strict=True):
        assert str(one.dtype) == DTYPES[out.dtype.name if not out.dtype.packed else "u8"]
        left, right = one.double().numpy(), np.asarray(law).astype(np.float64)
        assert left.shape == right.shape
        assert (np.isfinite(left) == np.isfinite(right)).all()
        kept = np.isfinite(left)
        step = max(UNLIKE.get(name, 0.02), 0.15 if out.dtype.narrow else 0)
        assert abs(left - right)[kept].max(initial=0) <= step * abs(right[kept]).max(initial=0), out.name


def as_numpy(value: Any, dtype: DType) -> Any:
    """A copy."""
    if not hasattr(value, "view"):
        return value
    if dtype is bf16 or (dtype.narrow and dtype.kind == "float"):
        raw = torch.uint8 if dtype.bytes == 1 else torch.int16
        return value.view(raw).numpy().copy().view(dtype.numpy)
    return value.numpy().copy()


@chain(M=4, N=10, K=3)
def turned(
    x: f32[M, N], codes: i4[M, N]
) -> tuple[f32[M, N], f32[M, N // 2], f32[2, 3], f32[M, N], f32[K, M, N], f32[N, M]]:
    """Views and joins of each kind; torch has no steps backward."""
    joined = F.concat([x[:, 5:], x[:, :5]])
    return (
        F.flip(x), x[:, ::-2], F.roll(x, 3)[3:0:-2, 7:1:-2] * 2, joined + codes,
        F.broadcast(x, (K, M, N)), F.rearrange(x, "m n -> n m"),
    )  # fmt: skip


def test_views_of_each_kind() -> None:
    graph = turned.graph
    values = {**values_for(graph), "codes": np.arange(20, dtype=np.uint8).reshape(4, 5) * 13}
    run = torch_chain(graph)
    got = as_tuple(run.function(*map(torch.as_tensor, values.values())))
    for one, law in zip(got, as_tuple(reference(graph)(*values.values())), strict=True):
        np.testing.assert_allclose(one.numpy(), law, rtol=1e-6)


@pytest.mark.parametrize("seed", range(60))
def test_random_chains(seed: int) -> None:
    check(random_chain(seed).graph.with_dtype(f32), rtol=2e-3)


@chain(M=4, N=8)
def odd(torch: f32[M, N], F_: f16[N], k: i32, s: f32) -> tuple[f32[M, N], f32[M, N]]:
    """Names that torch's source takes, numbers alone, numbers on either side of a maximum, casts."""
    device = F.exp(s) + F.cast(k, f32)
    constants = F.maximum(0.25, F.minimum(torch, s)) * device
    y = F.cast(F.cast(constants, bf16) * F_, f16) + F.clip(torch, -1.0, 0.5)
    return y, torch


def test_odd_names_and_numbers() -> None:
    check(odd.graph, rtol=0.05)


def test_torch_compile_takes_it() -> None:
    """Through its front end, which imports the module of what it compiles; code for the CPU is not wanted here."""
    graph = small(SPECS["scale_causal_softmax"]).with_dtype(f32)
    run = torch_chain(graph)
    values = [tensor(v) for v in values_for(graph).values()]
    whole = torch.compile(lambda *v: run.function(*v, *run.constants("cpu")), backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(*values), run.function(*values, *run.constants("cpu")))


def test_composites_are_torchs_own() -> None:
    assert "F.layer_norm(h, (h.shape[-1],), gamma, beta, eps=1e-05)" in torch_source(
        SPECS["bias_gelu_residual_ln"].graph
    )
    assert "F.rms_norm(h, (h.shape[-1],), gain, eps=1e-06)" in torch_source(SPECS["add_rmsnorm"].graph)
    assert "torch.log_softmax(logits, -1, dtype=torch.float32)" in torch_source(SPECS["log_softmax"].graph)
    assert torch_source(SPECS["scale_causal_softmax"].graph).endswith(
        """def constants(device):
    col_index = torch.arange(4096, device=device)
    last = torch.arange(4096, device=device)[:, None]
    keep = col_index <= last
    return (keep,)


def scale_causal_softmax(scores, keep):
    mul = scores * 0.125
    z = torch.where(keep, mul, float("-inf"))
    softmax = torch.softmax(z, -1)
    return softmax.to(torch.float16)
"""
    )


def test_grouped_products_are_torchs_own() -> None:
    """With an empty group and one of a single row; what torch has in rows of no group is anything."""
    for found, line in (
        (grouped.plain, "F.grouped_mm(x, w_T, offs=ends)"),
        (grouped.weighed, "F.grouped_mm(silu_times_y, w_T"),
        (grouped.biased, "F.pad(bias, (0, 0, 0, 1))[torch.searchsorted("),
    ):
        graph = found.at(T=20, N=16, K=24, E=4).graph
        assert line in torch_source(graph), torch_source(graph)
        values = values_for(graph) | {"ends": np.array([7, 7, 8, 20], np.int32)}
        run = torch_chain(graph)
        got = run.function(*map(tensor, values.values()), *run.constants("cpu")).float().numpy()
        assert np.allclose(got, reference(graph)(*values.values()), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("found", grouped.NARROW, ids=lambda c: c.name)
def test_grouped_products_of_8_bits(found: Chain) -> None:
    """Torch has grouped products of 16 bits alone. Rows of no group are 0, and ends may descend."""
    graph = found.at(T=20, E=4).graph
    rng = np.random.default_rng(3)
    values = {}
    for operand in graph.inputs:
        shape = tuple(size_of(size, graph.sizes) for size in operand.shape)
        numbers = rng.integers(-3, 4, shape) if operand.dtype.narrow else np.exp2(rng.integers(-6, 0, shape))
        values[operand.name] = numbers.astype(operand.dtype.numpy)
    for ends in ([7, 7, 8, 20], [3, -1, 12, 10], [5, 6, 9, 15]):
        values["ends"] = np.array(ends, np.int32)
        run = torch_chain(graph)
        got = run.function(*map(tensor, values.values()), *run.constants("cpu")).double().numpy()
        assert np.allclose(got, reference(graph)(*values.values()), rtol=0.01, atol=1e-6)
        assert (got[max(np.maximum.accumulate(ends)) :] == 0).all()


def test_selections_are_torchs_own() -> None:
    for graph in (SELECTING[0].graph, simplify(SELECTING[0].graph)):
        text = torch_source(graph)
        assert "softmax = torch.softmax(quotient, -1)\n    likely, columns = torch.topk(softmax, 7, -1)\n" in text
        assert "columns.to(torch.int32)" in text
    of_scores = torch_source(SELECTING[1].graph)
    assert "columns = torch.topk(score_plus_bias, 4, -1).indices\n" in of_scores
    assert "torch.take_along_dim(score, columns, -1)" in of_scores
    assert "torch.take_along_dim(bias[None], columns, -1)" in of_scores
    assert "torch.argmax(log_softmax, -1, keepdim=True)" in torch_source(SELECTING[2].graph)


@pytest.mark.parametrize("composite", COMPOSITES, ids=lambda c: f"{c.name}-{len(c.arrays)}")
def test_each_composite_is_found(composite: Any) -> None:
    @chain(M=3, N=5)
    def whole(x: f32[M, N], gamma: f32[N], beta: f32[N]) -> f32[M, N]:
        arrays = dict(zip(("x", "gamma", "beta"), (x, gamma, beta), strict=True))
        arrays["gain"] = gamma
        given = {name: arrays[name] for name in composite.arrays}
        numbers = {"eps": 0.25, "low": -0.5, "high": 0.75, "alpha": 1.5, "slope": 0.1, "p": 0.25}
        return composite.call(**given, **{n: numbers[n] for n in composite.numbers}) + x + gamma + beta

    found = [match(node) for node in whole.graph.nodes]
    names = [one[0].name for one in found if one is not None]
    assert composite.name in names
    if not draws(whole.graph):  # torch has other random numbers
        check(whole.graph)


def test_weights_that_torch_does_not_take_are_applied_after_its_own() -> None:
    @chain(M=3, N=5)
    def rescaled(x: f32[M, N], row: f32[M, 1]) -> f32[M, N]:
        return F.layernorm(x, row)  # a weight a row

    assert (
        "normalized = F.layer_norm(x, (x.shape[-1],), eps=1e-05)\n    scaled = normalized * row_number\n"
        in torch_source(rescaled.graph)
    )
    check(rescaled.graph)


@pytest.mark.parametrize("found", SELECTING, ids=lambda c: c.name)
def test_references_of_selections_run_on_torch_too(found: Chain) -> None:
    """What large launches on a GPU are held to: NaN, ties, signed zeros and masked columns as in numpy."""
    graph = found.graph
    values = values_for(graph)
    x = values["x"]
    x[0, ::3], x[1, 4:], x[2, :20:2], x[2, 1:20:2], x[3, [7, 3]] = 0.5, -np.inf, -0.0, 0.0, np.nan
    with np.errstate(all="ignore"):
        wanted = as_tuple(reference(graph)(*values.values()))
    got = torch_reference(reference_source(graph), entry_name(graph), "cpu")(*values.values())
    for one, law in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), law, rtol=1e-12)


@pytest.mark.parametrize("found", PRODUCTS, ids=lambda c: c.name)
def test_products_agree_with_their_references(found: Chain) -> None:
    graph = found.graph
    kinds = {t.dtype for t in (*graph.inputs, *graph.outputs)}
    check(graph, rtol=0.05 if bf16 in kinds else 5e-3)


def test_a_product_with_a_bias_is_what_a_torch_user_writes() -> None:
    assert "F.linear(x, w, bias)" in torch_source(bias_gelu.graph)
    assert "torch.addmm(bq, x, wq)" in torch_source(biased.graph)
    assert "x_times_wk = x @ wk" in torch_source(biased.graph)
    assert "h = F.rms_norm(x, (x.shape[-1],), gain, eps=1e-06)" in torch_source(norm_swiglu.graph)
    assert "h_times_w_gate = h @ w_gate" in torch_source(norm_swiglu.graph)
    assert ".to(torch.bfloat16)" in torch_source(scaled.graph), "x * row is f32 to torch"
