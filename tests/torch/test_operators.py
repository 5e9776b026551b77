"""Chains as operators of torch: numbers, schema, rules for shapes, gradients, and what is refused. On CPU tensors, in
the emulator."""

from __future__ import annotations

from typing import Any

import pytest

from fusegen import chain, dims, f32, i32
from fusegen import ops as F
from fusegen.errors import ArgumentError, RequestError
from fusegen.language.spec import Chain

torch: Any = pytest.importorskip("torch", reason="torch is missing: pip install torch")
from fusegen.torch import op, operators  # noqa: E402

M, N = dims("M N")


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


@pytest.fixture(scope="module")
def normed() -> Any:
    return op(rms, "fusegen_test::rms", backward=rms_backward, on="emulator")


def by_torch(x: Any, gain: Any, eps: float = 1e-5) -> Any:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def test_an_operator_computes_what_its_chain_does_for_any_row_length(normed: Any) -> None:
    for rows, cols in (5, 32), (1, 32), (4, 48), (5, 32):
        x, gain = torch.randn(rows, cols), torch.randn(cols)
        torch.testing.assert_close(normed(x, gain, 1e-5), by_torch(x, gain))
        torch.testing.assert_close(normed(x, gain=gain, eps=1e-5), by_torch(x, gain))
        out = torch.full_like(x, torch.nan)
        assert torch.ops.fusegen_test.rms_out(x, gain, 1e-5, out) is None
        assert torch.equal(out, normed(x, gain, 1e-5))


def test_a_graph_has_no_break_and_takes_other_row_counts(normed: Any) -> None:
    gain = torch.randn(32)
    compiled = torch.compile(lambda x: normed(x * 2, gain, 1e-5) + 1, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 7):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x), by_torch(2 * x, gain) + 1)


def test_a_model_is_exported_with_any_number_of_rows(normed: Any) -> None:
    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, gain: Any) -> Any:
            return normed(x, gain, 1e-5) * 2

    x, gain = torch.randn(4, 32), torch.randn(32)
    rows = {"x": {0: torch.export.Dim("rows", min=2)}, "gain": {}}
    exported = torch.export.export(Model(), (x, gain), dynamic_shapes=rows)
    other = torch.randn(9, 32)
    torch.testing.assert_close(exported.module()(other, gain), 2 * by_torch(other, gain))


@pytest.fixture(scope="module")
def derived() -> Any:
    return op(rms, "fusegen_test::rms_derived", backward="derived", on="emulator")


@pytest.mark.parametrize("made", ["normed", "derived"])
def test_gradients_are_those_of_torch(request: pytest.FixtureRequest, made: str) -> None:
    normed = request.getfixturevalue(made)
    x, gain = torch.randn(6, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    weights = torch.randn(6, 32)
    (normed(x, gain, 1e-5) * weights).sum().backward()
    found, (x.grad, gain.grad) = (x.grad, gain.grad), (None, None)
    (by_torch(x, gain) * weights).sum().backward()
    torch.testing.assert_close(found, (x.grad, gain.grad))
    x.grad = None
    normed(x, gain.detach(), 1e-5).sum().backward()  # a gradient whose strides are 0
    assert x.grad is not None


def test_a_word_that_says_nothing_of_gradients_is_refused() -> None:
    with pytest.raises(RequestError, match="takes chains, and 'derived' for backward="):
        op(rms, "fusegen_test::rms_by_word", backward="derive", on="emulator")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck asks it of a view
def test_torchs_own_checks_of_operators_pass(normed: Any) -> None:
    gain = torch.randn(32)
    for x in torch.randn(5, 32), torch.randn(5, 64)[:, 16:48], torch.randn(5, 32, requires_grad=True):
        torch.library.opcheck(normed, (x, gain, 1e-5))
    x = torch.randn(5, 32)
    torch.library.opcheck(torch.ops.fusegen_test.rms_out.default, (x, gain, 1e-5, torch.empty(5, 32)))


def test_computed_sizes_integers_and_several_results() -> None:
    found = op(halves, "fusegen_test::halves", on="emulator")
    x = torch.randn(3, 64)
    product, columns = found(x, 7)
    low, high = x.chunk(2, -1)
    torch.testing.assert_close(product, low * high)
    assert torch.equal(columns, (low + high).argmax(-1, keepdim=True).int() + 7)
    torch.library.opcheck(found, (x, 7), test_utils=("test_schema", "test_faketensor"))


def test_what_an_operator_refuses_is_one_sentence(normed: Any) -> None:
    gain = torch.randn(32)
    with pytest.raises(RequestError, match=r"no rule for torch\.vmap"):
        torch.vmap(lambda x: normed(x, gain, 1e-5))(torch.randn(2, 3, 32))
    with pytest.raises(ArgumentError, match="gain on axis 0 has 31"):
        normed(torch.randn(3, 32), torch.randn(31), 1e-5)
    with pytest.raises(ArgumentError, match=r"float64"):
        normed(torch.randn(3, 32).double(), gain, 1e-5)
    alone = op(rms, "fusegen_test::alone", on="emulator")
    with pytest.raises(ArgumentError, match="requires"):
        alone(torch.randn(3, 32, requires_grad=True), gain, 1e-5)
    with torch.no_grad():
        alone(torch.randn(3, 32, requires_grad=True), gain, 1e-5)


@chain(M=16, N=32)
def misnamed(x: f32[M, N], gradient: f32[M, N]) -> f32[M, N]:
    """An operand that is nothing the forward chain has."""
    return x * gradient


@pytest.mark.parametrize(
    ("name", "backward", "gradients", "said"),
    [
        ("rms", None, (), "is no operator's name"),
        ("fusegen_test::rms", None, (), "is an operator already"),
        ("fusegen_test::a", misnamed, ("x",), "operand gradient is nothing that is at hand there"),
        ("fusegen_test::b", rms_backward, ("x",), "gradients names 1 operands, and backward has 2 outputs"),
        ("fusegen_test::c", rms_backward, ("x", "eps"), "deps is the gradient of no operand"),
    ],
)
def test_what_can_be_no_operator(normed: Any, name: str, backward: Chain | None, gradients: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        op(rms, name, backward=backward, gradients=gradients)
    assert name not in operators.KEPT or name == "fusegen_test::rms"
